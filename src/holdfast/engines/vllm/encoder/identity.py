"""The fingerprint of encoder outputs, and the names of items, which say their content."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.client.model_meaning import canonical_json
from holdfast.engines.vllm.describe import ENGINE, resolved_digest
from holdfast.engines.vllm.encoder.items import BLOCK_BYTES, DTYPES
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.request_identity import MediaDigests, UnnamedInputError
from holdfast.engines.vllm.unsupported import UnsupportedError

_log = logging.getLogger("vllm.holdfast")


class ItemNames:
    """Names of the items of requests: vLLM's identifier, and a digest of what the encoder gets.

    vLLM's identifier alone may be what a client chose, and the encoder-cache interface tells the
    workers nothing else. So the scheduler names items, and tells the workers the names.
    """

    def __init__(self) -> None:
        self._media = MediaDigests()
        self._known: WeakKeyDictionary[Any, dict[int, bytes | None]] = WeakKeyDictionary()
        """By request and index of the item: vLLM asks for it in each step while it waits."""
        self._has_logged = False

    def name(self, request: Any, index: int) -> bytes | None:
        """Return the name of an item of a request; None if nothing says what its content is."""
        known = self._known.setdefault(request, {})
        if index not in known:
            known[index] = self._name(request.mm_features[index])
        return known[index]

    def _name(self, feature: Any) -> bytes | None:
        try:
            digest = self._media.digest(feature)
        except UnnamedInputError as error:
            if not self._has_logged:
                self._has_logged = True
                _log.warning("outputs of encoders are computed and not kept: %s", error)
            return None
        return f"{feature.modality}:{feature.identifier}:".encode() + digest


def encoder_fingerprint(vllm_config: Any, setting: ConnectorSettings) -> Fingerprint:
    """Return the fingerprint of the outputs of a model's encoders.

    The name of an item covers its content and the options of the processor that a request gives;
    the model, its weights and everything else that changes an output are in the fingerprint. Raises
    NoDigestError if the weights are unknown, UnsupportedError for a model without encoders, or
    whose weights change.
    """
    import vllm

    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnsupportedError(
            "weight_transfer_config replaces weights while the engine runs, and vLLM does not tell "
            "this connector when"
        )

    model = vllm_config.model_config
    options = getattr(model, "multimodal_config", None)
    if options is None:
        raise UnsupportedError("the model has no encoder of images or audio")
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedError("vLLM does not ask this connector about encoder-decoder models")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"encoder outputs of {dtype} are not kept; kept are {', '.join(DTYPES)}"
        )
    meaning = Meaning(
        model=resolved_digest(vllm_config, setting),
        positions="none",
        adapter="none",  # items of an adapter of the encoder have no content hash alone
        kv_quantisation="none",
        kv_scales="none",
        naming=canonical_json({"engine": ENGINE, "hash": "content", "what": "encoder outputs"}),
        block_tokens=1,
        kv_group=KvGroup.all_layers(1),
    )
    arrangement = {
        "processor": getattr(options, "mm_processor_kwargs", None) or {},
        "media": getattr(options, "media_io_kwargs", None) or {},
        "pruning": getattr(options, "video_pruning_rate", None),
        "attention": str(getattr(options, "mm_encoder_attn_backend", None)),
        "attention_dtype": str(getattr(options, "mm_encoder_attn_dtype", None)),
        "device": vllm_config.device_config.device_type,
    }
    layout = OpaqueLayout(
        dtype=dtype,
        block_tokens=1,
        layers=1,
        nbytes=BLOCK_BYTES,
        arrangement=canonical_json(arrangement),
        engine=ENGINE,
        engine_version=vllm.__version__,
    )
    return Fingerprint(meaning, layout)

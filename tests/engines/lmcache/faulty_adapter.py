"""The adapter with faults to plant in what it has loaded; LMCache's server imports it."""

from pathlib import Path

import numpy as np

from holdfast.engines.lmcache import HoldfastL2Adapter


class FaultyL2Adapter(HoldfastL2Adapter):
    """Loads as its base does, then plants the fault that the file `fault` names.

    `OTHER_PROMPT`: chunks have the bytes of the chunks that were loaded first. `NO_LAST_LAYER`: the
    last layer of each chunk has zeros. With any other content of the file there is no fault.
    """

    OTHER_PROMPT, NO_LAST_LAYER = "other prompt", "no last layer"

    def __init__(self, params, l1_memory_desc=None):
        own = dict(params)
        self._fault = Path(own.pop("fault"))
        self._asked, self._loaded_first = {}, []
        super().__init__(own, l1_memory_desc)

    def submit_load_task(self, keys, objects):
        task = super().submit_load_task(keys, objects)
        self._asked[task] = objects
        return task

    def query_load_result(self, task_id):
        loaded = super().query_load_result(task_id)
        if loaded is not None:
            self._plant(self._fault.read_text(), self._asked.pop(task_id))
        return loaded

    def _plant(self, fault, objects):
        self._loaded_first = self._loaded_first or [bytes(each.byte_array) for each in objects]
        for each, other in zip(objects, self._loaded_first, strict=True):
            content = np.frombuffer(each.byte_array, np.uint8)
            if fault == self.OTHER_PROMPT:
                content[:] = np.frombuffer(other, np.uint8)
            if fault == self.NO_LAST_LAYER:
                (shape,) = each.get_shapes()  # the last axes: layer, token, what a token has
                content.reshape(*shape[:-2], -1)[..., -1, :] = 0

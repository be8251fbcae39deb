"""The model of `holdfast size` and `holdfast sim`: `--model` and `--weights-dtype`."""

from __future__ import annotations

import argparse

from holdfast.errors import ConfigError
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.model.shape import WEIGHT_BITS, ModelShape


def add_model_arguments(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Declare the model, and the type of its weights."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a shipped model (holdfast size --models), or a config.json",
    )
    parser.add_argument(
        "--weights-dtype",
        metavar="T",
        help=f"type of the weights: {', '.join(WEIGHT_BITS)} (default: as published)",
    )


def read_model_arguments(args: argparse.Namespace) -> ModelShape | None:
    """Return the model that the arguments name; None without one. Raises ConfigError."""
    if args.model:
        shape = load_model(args.model)
        return shape.with_weights(args.weights_dtype) if args.weights_dtype else shape
    if args.weights_dtype:
        raise ConfigError("--weights-dtype: needs a model; add --model")
    return None

"""Inputs that once were trouble, or look like it: each is refused in words, at once."""

import time
from pathlib import Path

import pytest

from holdfast.testing.fuzz import every_subject

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
INPUTS = sorted(CORPUS.glob("*/*"))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return every_subject(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_it_is_refused(file, subjects):
    subject = subjects[file.parent.name]
    start = time.thread_time()
    with pytest.raises(subject.refusals):
        subject.parse(file.read_bytes())
    assert time.thread_time() - start < 1


def test_every_parser_has_inputs_of_its_own(subjects):
    assert {file.parent.name for file in INPUTS} == set(subjects)


@pytest.mark.parametrize("name", ["requests", "replies", "envelope", "token", "members", "config"])
def test_the_seeds_are_understood(name, subjects):
    for seed in subjects[name].seeds[:1]:
        subjects[name].parse(seed)

"""Inputs that once were trouble, or look like it: each is refused in words, at once."""

import contextlib
import random
import time
from pathlib import Path

import pytest

from holdfast.tiers.disk import region
from holdfast_bench.campaigns import fuzz
from holdfast_bench.campaigns.campaign import CampaignBudget
from holdfast_bench.campaigns.fuzz import every_subject, mutated

CORPUS = Path(__file__).resolve().parents[2] / "corpus"
INPUTS = sorted(CORPUS.glob("*/*"))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return every_subject(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_malformed_input_is_refused_within_a_second(file, subjects):
    subject = subjects[file.parent.name]
    start = time.thread_time()
    with pytest.raises(subject.refusals):
        subject.parse(file.read_bytes())
    assert time.thread_time() - start < 1


def test_every_parser_has_its_own_inputs(subjects):
    assert {file.parent.name for file in INPUTS} == set(subjects)


SUBJECTS = [
    "requests", "replies", "target.requests", "target.replies",
    "envelope", "region", "token", "members", "config",
]  # fmt: skip


def test_the_subjects_tested_here_are_all_fuzz_subjects(subjects):
    assert list(subjects) == SUBJECTS


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_seeds_are_understood(name, subjects):
    for seed in subjects[name].seeds:
        assert subjects[name].parse(seed)


@pytest.mark.parametrize("name", ["target.requests", "target.replies"])
def test_an_input_shorter_than_a_header_is_not_counted_as_accepted(name, subjects):
    assert not subjects[name].parse(subjects[name].seeds[0][:15])


@pytest.mark.parametrize("name", ["target.requests", "target.replies", "region"])
def test_some_mutated_inputs_are_understood(name, subjects):
    subject, understood = subjects[name], 0
    for number in range(500):
        data = mutated(subject.seeds, random.Random(number))
        with contextlib.suppress(*subject.refusals):
            understood += subject.parse(
                subject.fix_checksum(data) if subject.fix_checksum else data
            )
    assert understood > 10


def test_entries_of_mutated_footers_are_read(subjects, monkeypatch):
    read, header_of = [], region._header_of
    monkeypatch.setattr(region, "_header_of", lambda *said: read.append(said) or header_of(*said))
    subject = subjects["region"]
    footers = [seed for seed in subject.seeds if seed[-64:-60] == b"HFF1"]
    for number in range(100):
        data = subject.fix_checksum(mutated(footers, random.Random(number)))
        with contextlib.suppress(*subject.refusals):
            subject.parse(data)
    assert len(read) > 100


def test_a_parser_that_accepts_no_input_is_reported(tmp_path):
    def refuse(data):
        raise ValueError

    budget = CampaignBudget(tries=fuzz.PROVEN_AT, seed=1, folder=tmp_path)
    result = fuzz._feed(
        "fuzz.nothing", fuzz.FuzzSubject([b"a seed"], refuse, (ValueError,)), budget
    )
    assert result.failures == ["no input was accepted: the mutations are too large"]

"""Which fields of JSON Lines are texts, pairs and answers."""

from __future__ import annotations

import json

import pytest

from compressor.lab import text_fields
from compressor.lab.found_data import look_at


@pytest.mark.parametrize(
    ("texts", "pair"),
    [
        (("sentence1", "sentence2"), ("sentence1", "sentence2")),
        (("sentence_B", "sentence_A"), ("sentence_A", "sentence_B")),
        (("hypothesis", "premise"), ("premise", "hypothesis")),
        (("query", "note", "passage"), ("query", "passage")),
        (("question1", "question2"), ("question1", "question2")),
        (("text", "text_pair"), ("text", "text_pair")),
        (("question", "context"), ("question", "context")),
        (("text", "query"), ("query", "text")),
        (("a", "b"), ("a", "b")),
        (("text", "title"), None),
        (("sentence1",), None),
        ((), None),
    ],
)
def test_pairs_have_usual_names(texts, pair):
    assert text_fields.pair_of(texts) == pair


def test_an_identifier_or_the_name_of_a_class_is_no_text():
    fields = {"id": "a7", "label_text": "good", "sentence": "A film.", "text": "B", "n": 1}
    assert text_fields.texts_of(fields) == ("text", "sentence")
    assert text_fields.texts_of({"id": "a7", "label": "good"}) == ("id",)
    assert text_fields.texts_of({"label": "good"}) == ()


@pytest.mark.parametrize(
    ("finds", "value", "others"),
    [
        ("class_in", "good", (0.5, [1, 0])),
        ("score_in", 0.5, ("good", [1, 0])),
        ("list_in", ["B", "I"], ("good", 1)),
        ("numbers_in", [0.5, 1], ("good", 1, ["B"])),
        ("span_in", [3, 9], ("good", 1, [1, 2, 3])),
    ],
)
def test_an_answer_has_a_usual_name_and_the_form_that_is_needed(finds, value, others):
    find = getattr(text_fields, finds)
    assert find({"id": value, "label": value}) == "label"
    for other in others:
        assert not find({"label": other})


def test_a_field_counts_if_the_next_objects_have_it_too(tmp_path):
    lines = [{"text": "a", "note": "b", "score": 1}, {"text": "a", "note": None, "score": 0.5}]
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert look_at(tmp_path / "d.jsonl").fields == {"text": "a", "score": 1}

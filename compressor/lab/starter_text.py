"""The parts of a starter spec for an encoder of text, whose samples are lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from compressor.calibration.sources.tokenizer import beside
from compressor.errors import SpecError, listed
from compressor.lab.found_data import LABELS, labels
from compressor.lab.starter_data import Given
from compressor.lab.starter_heads import REGRESSION, SEVERAL_LABELS
from compressor.lab.starter_parts import (
    EXPERTS_FIRST,
    LINES,
    LINES_OF,
    OF_OBJECTS,
    OF_PAIRS,
    OF_TEXT,
    SECOND_TEXT,
    TEXT,
    TEXT_INPUTS,
)
from compressor.lab.text_fields import (
    class_in,
    list_in,
    numbers_in,
    pair_of,
    score_in,
    span_in,
    texts_of,
)
from compressor.spec.source_text import scalar
from compressor.types.tensors import TensorSpec

if TYPE_CHECKING:
    from compressor.lab.inspect.checkpoint import WeightSummary

_COMMENT = 98  # characters of a line, without its mark
_CLASSES = "AutoModelForSequenceClassification"
_TOKENS = "AutoModelForTokenClassification"
_VECTORS = ("AutoModel", "AutoModelForTextEncoding")
_MOST_TOKENS = 512

_WITH_LABELS = "\n# With answers in the data (`jsonl`, `target`): "


@dataclass(frozen=True)
class _Task:
    """What a kind of network is judged by.

    Attributes:
        metric: without answers.
        why: a comment on it.
        pairs: whether it reads pairs; ``None`` if that is open.
        answer: finds the field with the answers.
        answered: the metric with these, and a comment on it.
        classes: the answers are classes.
    """

    metric: str
    why: str
    pairs: bool | None = False
    answer: Callable[[Mapping[str, Any]], str] = lambda _: ""
    answered: tuple[str, str] = ("", "")
    classes: bool = False


_SCORES = _Task(
    "spearman",
    f"Whether the scores of texts are in the float model's order.{_WITH_LABELS}in theirs.",
    None,
    score_in,
    ("spearman", "Whether the scores of texts are in the right order."),
)
_SEVERAL = _Task(
    "subset-accuracy",
    f"The share of texts whose labels (scores above 0) are the float model's.{_WITH_LABELS}"
    "the right ones.",
    None,
    list_in,
    ("subset-accuracy", "The share of texts whose labels (scores above 0) are all right."),
)
_NUMBERS = _Task(
    "mse",
    "The mean squared error of the numbers against the float model's: it estimates numbers, of\n"
    f"# which the largest says nothing.{_WITH_LABELS}against these.",
    None,
    numbers_in,
    ("mse", "The mean squared error of the numbers."),
)
_SIDE = _Task(
    "cosine",
    "The cosine between the float model's outputs and each artifact's: the vectors of tokens, and\n"
    "# that of the text, if there is one. What the whole network makes of them is not judged.",
)
_OF_CLASSES = _Task(
    "agreement",
    f"The share of answers that are the float model's.{_WITH_LABELS}accuracy or f1.",
    None,
    class_in,
    ("accuracy", "The share of right answers; or f1."),
    classes=True,
)
_OF_WORDS = _Task(
    "token-accuracy", "The share of tokens for which the float model expects the same word."
)
_TASKS = {
    _CLASSES: _OF_CLASSES,
    "AutoModelForNextSentencePrediction": replace(_OF_CLASSES, pairs=True),
    _TOKENS: _Task(
        "token-accuracy",
        f"The share of tokens with the float model's answer.{_WITH_LABELS}the right one's; or f1.",
        answer=list_in,
        answered=("token-accuracy", "The share of tokens with the right answer; or f1."),
        classes=True,
    ),
    "AutoModelForQuestionAnswering": _Task(
        "span-accuracy",
        "The share of answers whose first and last token are the float model's.",
        True,
        span_in,
        ("span-accuracy", "The share of answers whose first and last token are the right ones."),
    ),
    "AutoModelForMaskedLM": _OF_WORDS,
}


def text_data(
    place: str, auto_class: str, network: Any, given: Given, *, part: str = "", side: bool = False
) -> str:
    """Return the rest of the part ``model``, and the parts ``data`` and ``metric``.

    Args:
        place: the model's path as YAML.
        network: what is run, on the ``meta`` device.
        part: its path in the whole network; empty if it is that.
        side: it is one of several sides, which make vectors of their outputs.
    """
    from compressor.models.transformers.carrier import further_inputs, longest_text, text_inputs

    inputs, longest = text_inputs(network), longest_text(network)
    task = _SIDE if side else _task(given.model, "AutoModel" if part else auto_class, network)
    held = {} if given.found is None else given.found.fields
    answer = task.answer(held) if given.suits(classes=task.classes) else ""
    metric, why = task.answered if answer else (task.metric, task.why)
    fields, pairs = _fields(task, texts_of(held))
    kind = "jsonl" if fields or pairs or texts_of(held) else "text"
    calibration, evaluation = (
        LINES_OF.format(
            kind=kind,
            file=f"{role}.{'txt' if kind == 'text' else kind}",
            model=place,
            length=_length(given.model, longest),
            fields="".join(f"    {line}\n" for line in fields),
            mapping=", ".join(f"{i.name}: {i.name}" for i in inputs),
        )
        for role in ("calibration", "evaluation")
    )
    return written_inputs(inputs, further_inputs(network, inputs)) + LINES.format(
        more=OF_PAIRS if task.pairs and not held else OF_OBJECTS if held else OF_TEXT,
        calibration=calibration,
        evaluation=evaluation + (f"\n    target: {scalar(answer)}" if answer else ""),
        why=why,
        metric=metric,
    )


def continued_text(place: str, length: int, weights: WeightSummary) -> str:
    """Return the parts ``data``, ``metric`` and ``passes`` for a network that continues text.

    Args:
        place: the model's path as YAML.
        length: tokens of a sample.
        weights: of the model; widths decide how many share a scale.
    """
    first = EXPERTS_FIRST if weights.experts else ""
    return TEXT.format(model=place, length=length, first=first, group=weights.group)


def _task(model: Path, auto_class: str, network: Any) -> _Task:
    """Return what a network is judged by."""
    config = network.config
    heads = auto_class in (_CLASSES, _TOKENS)
    if heads and config.problem_type == REGRESSION and config.num_labels > 1:
        return _NUMBERS if auto_class == _CLASSES else _of_outputs(auto_class)
    if auto_class == _CLASSES and config.num_labels == 1:
        return _SCORES
    if auto_class == _CLASSES and config.problem_type == SEVERAL_LABELS:
        return _SEVERAL
    if auto_class == _TOKENS and (config.num_labels == 1 or config.problem_type == SEVERAL_LABELS):
        return _of_outputs(auto_class)
    if auto_class in _TASKS:
        return _TASKS[auto_class]
    if auto_class in _VECTORS:
        return _embedding(model)
    # Of several outputs, the first with scores of classes counts.
    return _of_outputs(auto_class) if network.get_output_embeddings() is None else _OF_WORDS


def _of_outputs(auto_class: str) -> _Task:
    """Return how outputs are judged whose meaning is no class, word or vector."""
    why = f"The outputs of {auto_class} against the float model's. What it decides is not judged."
    return _Task("mse", _wrapped(why), pairs=None)


def _fields(task: _Task, texts: Sequence[str]) -> tuple[list[str], bool]:
    """Return the lines that name the texts, and whether they are pairs."""
    pair = pair_of(texts) if task.pairs is not False else None
    if task.pairs and pair is None:
        pair = (texts[0], texts[1]) if len(texts) > 1 else ("question", "context")
    if pair is not None:
        return [f"field: {scalar(pair[0])}", f"text-pair: {scalar(pair[1])}"], True
    lines = [] if not texts or texts[0] == "text" else [f"field: {scalar(texts[0])}"]
    if task.pairs is None and len(texts) > 1:
        lines.append(SECOND_TEXT.format(field=scalar(texts[1])))
    return lines, False


def _embedding(model: Path) -> _Task:
    """Return how vectors of texts are judged: as the directory makes them."""
    from compressor.models.transformers.pooling import pooling_of

    try:
        vector = pooling_of(model).words()
    except SpecError as error:
        why = f"The cosine between the vectors of all tokens. The metric embedding {error.problem}."
        return _Task("cosine", _wrapped(why))
    return _Task(
        "embedding",
        _wrapped(
            "The cosine between the float model's and each artifact's embedding of a text: "
            f"{vector}. The mean of all samples and the worst."
        ),
    )


def _wrapped(comment: str) -> str:
    """Return a comment without its first mark in lines of 100 characters."""
    return "\n# ".join(wrap(comment, _COMMENT))


def written_inputs(inputs: Sequence[TensorSpec], further: Sequence[str]) -> str:
    """Return the lines that name the inputs of a network that reads text.

    Args:
        further: what it can be given besides.
    """
    note = f"CHECK: it gets none of what forward takes besides: {listed(further)}"
    lines = [f"    # {line}" for line in wrap(note, _COMMENT - 4)] if further else []
    return TEXT_INPUTS.format(inputs="\n".join([*map(input_line, inputs), *lines]))


def likely_lines(inputs: Sequence[TensorSpec], given: Given) -> str:
    """Return the lines of a spec for the inputs that a network is taken to have.

    An array with one number a sample beside several is named in a comment: it may be one more, such
    as the time step of a diffusion network, or a right answer.
    """
    lines = [input_line(spec) for spec in inputs]
    found = given.arrays[1] if len(given.arrays[1]) > 1 else {}
    taken = {labels(found), *LABELS, *(spec.name for spec in inputs)}
    for name, header in found.items():
        if len(header.shape) == 1 and name not in taken:
            line = input_line(TensorSpec(name, ("batch",), header.dtype.name)).strip()
            lines.append(f"    # {line} # CHECK: an input, too? Then name it under data, too")
    return "\n".join(lines)


def input_line(spec: TensorSpec) -> str:
    """Return the line of a spec for an input of the model."""
    axes = ", ".join(map(str, spec.shape))
    return f"    {scalar(spec.name)}: {{shape: [{axes}], dtype: {spec.dtype}}}"


def _length(model: Path, longest: int | None) -> int:
    """Return how many tokens the model was made for, at most 512."""
    stated: list[Mapping[str, Any]] = [
        beside(model, name) for name in ("sentence_bert_config.json", "tokenizer_config.json")
    ]
    limits = [
        longest,
        *(s.get(key) for s in stated for key in ("max_seq_length", "model_max_length")),
    ]
    return min([_MOST_TOKENS, *(n for n in limits if type(n) is int and n > 0)])

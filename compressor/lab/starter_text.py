"""The parts of a starter spec for an encoder of text, whose samples are lines of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from compressor.calibration.sources.tokenizer import beside
from compressor.errors import SpecError
from compressor.lab.starter_parts import LINES, LINES_OF, OF_PAIRS, OF_TEXT, TEXT_INPUTS
from compressor.spec.source_text import scalar
from compressor.types.tensors import TensorSpec

_COMMENT = 98  # characters of a line, without its mark
_CLASSES = "AutoModelForSequenceClassification"
_MOST_TOKENS = 512
SEVERAL_LABELS = "multi_label_classification"
"""``problem_type`` of a ``config.json`` whose samples may have several labels each."""

_WITH_LABELS = "\n# With answers in the data (`jsonl`, `target`): "


@dataclass(frozen=True)
class _Task:
    """What a kind of network is judged by without answers, and why; and with them, if it is."""

    metric: str
    why: str
    pairs: bool = False
    answered: tuple[str, str] | None = None


_SCORES = _Task(
    "spearman",
    f"Whether the scores of texts are in the float model's order.{_WITH_LABELS}in theirs.",
    answered=("spearman", "Whether the scores of texts are in the right order."),
)
_SEVERAL = _Task(
    "subset-accuracy",
    f"The share of texts whose labels (scores above 0) are the float model's.{_WITH_LABELS}"
    "the right ones.",
    answered=("subset-accuracy", "The share of texts whose labels (scores above 0) are all right."),
)
_SIDE = _Task(
    "cosine",
    "The cosine between the float model's outputs and each artifact's: the vectors of tokens, and\n"
    "# that of the text, if there is one. What the whole network makes of them is not judged.",
)
_TASKS = {
    _CLASSES: _Task(
        "agreement",
        f"The share of answers that are the float model's.{_WITH_LABELS}accuracy or f1.",
        answered=("accuracy", "The share of right answers; or f1."),
    ),
    "AutoModelForTokenClassification": _Task(
        "token-accuracy",
        f"The share of tokens with the float model's answer.{_WITH_LABELS}the right one's; or f1.",
        answered=("token-accuracy", "The share of tokens with the right answer; or f1."),
    ),
    "AutoModelForQuestionAnswering": _Task(
        "span-accuracy",
        "The share of answers whose first and last token are the float model's.",
        pairs=True,
    ),
    "AutoModelForMaskedLM": _Task(
        "token-accuracy", "The share of tokens for which the float model expects the same word."
    ),
}


def text_data(
    model: Path, place: str, auto_class: str, network: Any, answer: str = "", *, side: bool = False
) -> str:
    """Return the rest of the part ``model``, and the parts ``data`` and ``metric``.

    Args:
        place: the model's path as YAML.
        network: what is run, on the ``meta`` device.
        answer: the field of the data with what is right; empty without one.
        side: it is one side of a network, which makes vectors of its outputs.
    """
    from compressor.models.transformers.carrier import longest_text, text_inputs

    inputs, longest = text_inputs(network), longest_text(network)
    single = auto_class == _CLASSES and network.config.num_labels == 1
    task = _SCORES if single else _TASKS.get(auto_class)
    if auto_class == _CLASSES and network.config.problem_type == SEVERAL_LABELS:
        task = _SEVERAL
    task = _SIDE if side else task or _embedding(model)
    judged = task.answered if answer else None
    metric, why = judged or (task.metric, task.why)
    names = ", ".join(f"{i.name}: {i.name}" for i in inputs)
    fields = "    field: question\n    text-pair: context\n" if task.pairs else ""
    kind = "jsonl" if task.pairs else "text"
    calibration, evaluation = (
        LINES_OF.format(
            kind=kind,
            file=f"{role}.{'jsonl' if task.pairs else 'txt'}",
            model=place,
            length=_length(model, longest),
            fields=fields,
            mapping=names,
        )
        for role in ("calibration", "evaluation")
    )
    return TEXT_INPUTS.format(inputs="\n".join(map(_input, inputs))) + LINES.format(
        more=OF_PAIRS if task.pairs else OF_TEXT,
        calibration=calibration,
        evaluation=evaluation + (f"\n    target: {scalar(answer)}" if judged else ""),
        why=why,
        metric=metric,
    )


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


def _input(spec: TensorSpec) -> str:
    return f"    {spec.name}: {{shape: [{', '.join(map(str, spec.shape))}], dtype: {spec.dtype}}}"


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

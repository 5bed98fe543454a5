"""In which order candidates are proved, where the proofs end, and which one is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from compressor.errors import DataError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.proofs import Proofs
from compressor.lab.tune.searched import Searched
from compressor.lab.tune.watch import Watch


@dataclass
class Made:
    """A candidate: its bytes, what the search says of it, and what its evaluation will."""

    name: str
    bytes: int
    bound: float | None = 0.1
    least: float | None = None
    drop: float = 0.0
    verdict_of_proof: str = "passed"
    ratio: float | None = None
    interval: tuple[float, float] = (1.0, 1.0)
    size_ratio: float = 0.5
    sqnr_db: float | None = 0.0
    searched_drop: float | None = None
    stopped: bool = False
    needs: int | None = None
    proof: Any = None
    verdict: Any = None

    def __post_init__(self) -> None:
        if self.sqnr_db == 0.0:  # the larger, the quieter
            self.sqnr_db = self.bytes / 10


@dataclass
class Bench:
    """Knows what was made, and notes what was evaluated."""

    evaluation_samples: int = 100
    evaluated: list[str] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def searched(self, made: Made) -> Searched:
        drop = made.searched_drop
        return Searched(100, drop, made.bound, made.sqnr_db, made.stopped, made.least)

    def proved(self, made: Made) -> Any:
        if made.verdict_of_proof == "undefined":
            raise DataError("metric 'm'", "returned NaN or infinity", "return finite numbers")
        made.proof = SimpleNamespace(drop=made.drop, ci95=(made.drop, made.drop))
        made.verdict = made.verdict_of_proof
        self.evaluated.append(made.name)
        return made.proof

    def timed(self, made: Made) -> Any:
        return None if made.ratio is None else {"value": made.ratio, "ci95": list(made.interval)}

    def samples_to_prove(self, made: Made) -> int | None:
        return made.needs


def proofs(**goal: Any) -> Any:
    goal = {"metric_drop": 0.5, **goal}
    return Proofs(Bench(), Goal(**goal), Mock(path=[]), Mock(), lambda c: c)  # type: ignore[arg-type]


def finished(pool: Sequence[Made], **goal: Any) -> tuple[str | None, list[str]]:
    """Return the answer's name, and those of all that were evaluated, in their order."""
    made = proofs(**goal)
    best = made.finish(pool)
    return None if best is None else best.name, made.bench.evaluated


def test_chance_in_the_search_does_not_put_the_noisier_first() -> None:
    few = [Made("a", 300, bound=0.4, least=-0.3), Made("b", 100, bound=0.1, least=-0.6)]
    assert finished(few) == ("b", ["a", "b"])
    many = [Made("a", 300, bound=0.4, least=0.2), Made("b", 100, bound=0.1, least=0.0)]
    assert finished(many) == ("b", ["b"])
    few = [Made("a", 300, bound=0.6, least=-0.3), Made("b", 100, bound=0.1, least=-0.6)]
    assert finished(few) == ("b", ["a", "b"])  # what only chance leaves no hope for
    many = [Made("a", 300, stopped=True), Made("b", 100, bound=0.1, least=-0.6)]
    assert finished(many) == ("b", ["b"])


def test_what_is_looked_at_last_has_its_rounding_trained() -> None:
    """ResNet-20 ended with 4 bits as they were, which training makes quieter for nothing."""
    far, near = Made("c", 100, bound=0.8), Made("c, trained", 100, bound=0.6)
    for verdict, made in (("passed", [far]), ("failed", [])):
        search, asked = proofs(), []
        search.improved = lambda c, asked=asked: asked.append(c) or near  # type: ignore[func-returns-value]
        near.proof = None
        best = search.finish([Made("a", 300), Made("b", 200, verdict_of_proof=verdict), far])
        assert asked == made  # only if all before it are proved: training takes long
        assert best.name == ("c, trained" if made else "a")
        assert far.proof is None


def test_the_smallest_that_is_proved_is_the_answer() -> None:
    """The safest is looked at first, and the first that is not proved ends it."""
    pool = [Made("a", 300), Made("b", 200), Made("c", 100, verdict_of_proof="failed")]
    pool.append(Made("d", 50, bound=0.2))
    assert finished(pool) == ("b", ["a", "b", "c"])


def test_a_metric_that_is_not_defined_for_a_candidate_proves_nothing_of_it() -> None:
    """The whole search ended there, though an answer was proved and published."""
    undefined = Made("c", 100, verdict_of_proof="undefined")
    pool = [Made("a", 300), Made("b", 200), undefined, Made("d", 50)]
    made = proofs()
    best = made.finish(pool)
    assert (best.name, made.bench.evaluated, made.going) == ("b", ["a", "b"], False)
    told = made.journal.skip.call_args_list
    assert [call.args for call in told] == [("proof of c", "returned NaN or infinity")]
    quietest = Made("a", 300, verdict_of_proof="undefined")
    assert finished([quietest, Made("b", 200)], metric_drop=None, size_ratio=0.5) == ("b", ["b"])
    assert finished([quietest]) == (None, [])


@pytest.mark.parametrize("stopped", [True, False])
def test_what_is_known_to_break_the_limit_is_not_looked_at(stopped: bool) -> None:
    pool = [Made("a", 300), Made("b", 200, stopped=stopped)]
    assert finished(pool)[1] == (["a"] if stopped else ["a", "b"])


def chain(count: int, **keys: Any) -> list[Made]:
    return [Made(f"{i}", 1000 - 100 * i, **keys) for i in range(count)]


def test_five_are_looked_at_and_three_more_of_what_comes_last() -> None:
    """Both ends of each pool, and what lies evenly between."""
    made = proofs()
    made.expected(chain(9))
    assert made.bench.evaluated == list("02468")
    made.expected([Made(f"late {i}", 190 - 10 * i) for i in range(7)])
    assert made.bench.evaluated[5:] == ["late 0", "late 3", "late 6"]


def test_of_what_is_left_as_many_are_looked_at_as_five_need() -> None:
    made = proofs()
    made.expected(chain(1))
    made.expected([Made(f"late {i}", 900 - 100 * i) for i in range(8)])
    assert len(made.bench.evaluated) == 5


@pytest.mark.parametrize(("bound", "looked_at"), [(0.5, True), (None, True), (0.51, False)])
def test_hopeful_is_what_may_be_shown_to_keep_the_limit(
    bound: float | None, looked_at: bool
) -> None:
    made = proofs()
    made.expected([Made("a", 100, bound=bound)])
    assert bool(made.bench.evaluated) is looked_at


def test_nothing_is_looked_at_twice() -> None:
    pool = chain(3)
    made = proofs()
    made.expected(pool)
    assert made.finish(pool) is pool[2]
    assert made.bench.evaluated == ["0", "1", "2"]


def test_where_none_is_hopeful_the_least_bad_is_looked_at_alone() -> None:
    pool = [Made("a", 300, bound=2.0), Made("b", 200, bound=1.5), Made("c", 100, bound=3.0)]
    assert finished(pool) == ("b", ["b"])
    pool = [Made("a", 300, bound=2.0, verdict_of_proof="failed", drop=1.0)]
    assert finished(pool) == (None, ["a"])
    assert finished([]) == (None, [])


def test_behind_what_is_proved_comes_what_is_not_expected_the_nearest_first() -> None:
    """Up to twice the limit, and two at most."""
    far = [Made("far", 40, bound=1.1), Made("c", 200, bound=0.8), Made("b", 250, bound=0.6)]
    pool = [Made("a", 300), *far, Made("d", 100, bound=0.9)]
    assert finished(pool) == ("c", ["a", "b", "c"])


def test_what_keeps_the_limit_as_measured_is_an_answer_until_one_breaks_it() -> None:
    """Where the first is not proved, the order goes on by what the search measured."""
    shared: dict[str, Any] = {"bound": 0.4, "verdict_of_proof": "unknown"}
    pool = [
        Made("a", 400, drop=0.3, **shared),
        Made("b", 300, drop=0.5, **shared),
        Made("c", 200, drop=0.51, **shared),
        Made("d", 100, drop=0.0, **shared),
    ]
    assert finished(pool) == ("b", ["a", "b", "c"])


def test_without_hope_the_order_goes_on_while_the_search_kept_the_limit() -> None:
    shared: dict[str, Any] = {"bound": 2.0, "verdict_of_proof": "unknown", "drop": 0.1}
    near, far = ({**shared, "searched_drop": drop} for drop in (0.5, 0.6))
    pool = [Made("a", 400, **near), Made("b", 300, **near), Made("c", 200, **far)]
    assert finished(pool) == ("b", ["a", "b"])
    assert finished([Made("a", 400, **near), Made("c", 200, **far)]) == ("a", ["a"])
    stopped = Made("d", 200, stopped=True, **near)
    assert finished([Made("a", 400, **near), stopped]) == ("a", ["a"])
    unlabelled = {**shared, "searched_drop": None}
    assert finished([Made("a", 400, **near), Made("e", 200, **unlabelled)])[0] == "e"


def test_behind_one_that_is_not_proved_no_proof_counts() -> None:
    pool = [Made("a", 400, verdict_of_proof="unknown"), Made("b", 300)]
    made = proofs()
    assert made.finish(pool) is pool[1]
    assert pool[1].verdict == "unknown"
    assert made.is_open
    first, second = made.journal.path
    assert first.startswith("keeps the limit as measured, but is not proved: ")
    assert second.startswith("keeps the limit as measured, but is not proved: ")


def test_the_first_that_is_not_proved_behind_a_proof_ends_it() -> None:
    """That it keeps the limit as measured does not help."""
    pool = [Made("a", 400), Made("b", 300, verdict_of_proof="unknown"), Made("c", 200)]
    made = proofs()
    assert made.finish(pool) is pool[0]
    assert made.bench.evaluated == ["a", "b"]
    assert not made.is_open
    assert [line.split(":")[0] for line in made.journal.path] == [
        "proved",
        "keeps the limit as measured, but is not proved",
    ]
    pool = [Made("a", 400), Made("b", 300, verdict_of_proof="failed", drop=0.1), Made("c", 200)]
    made = proofs()
    assert made.finish(pool) is pool[0]
    assert made.journal.path[1].startswith("not proved: ")
    made.expected([Made("d", 100)])
    assert made.bench.evaluated == ["a", "b"]


def test_each_that_is_the_best_so_far_is_published() -> None:
    pool = [*chain(2), Made("c", 100, verdict_of_proof="failed")]
    made = proofs()
    made.finish(pool)
    assert [call.args[0].name for call in made.publish.call_args_list] == ["0", "1"]


def test_without_a_limit_of_the_metric_the_quietest_that_fits_is_the_answer() -> None:
    """Of those as quiet, the smaller."""
    loud, quiet = Made("loud", 100, sqnr_db=20.0), Made("quiet", 90, sqnr_db=25.0)
    large, equal = Made("large", 300, sqnr_db=25.0), Made("equal", 300, sqnr_db=None)
    keys: dict[str, Any] = {"metric_drop": None, "size_ratio": 0.5}
    assert finished([loud, large, quiet], **keys) == ("quiet", ["quiet"])
    equal.size_ratio = 0.51
    assert finished([loud, equal], **keys)[0] == "loud"
    equal.size_ratio = 0.5
    made = proofs(**keys)
    assert made.finish([loud, equal]) is equal
    made.publish.assert_called_once_with(equal)
    assert not made.is_open
    made = proofs(**keys)
    assert made.finish([]) is None
    made.publish.assert_not_called()


@pytest.mark.parametrize(
    ("interval", "ratio", "fast"),
    [((0.7, 0.9), 0.8, True), ((0.7, 0.91), 0.8, False), ((0.4, 0.85), 0.6, False)],
)
def test_fast_is_what_is_shown_to_keep_the_limit_of_latency(
    interval: tuple[float, float], ratio: float, fast: bool
) -> None:
    """An interval that is wide has to lie half its width away."""
    made = proofs(latency_ratio=0.9)
    candidate = Made("a", 100, ratio=ratio, interval=interval)
    assert made.fits(candidate) is fast
    assert made.is_fast(candidate) is fast
    line = f"a: latency ratio {ratio:.2f} ×: left out"
    assert made.journal.path == ([] if fast else [line])


def test_what_was_not_timed_is_left_out_where_there_is_a_limit() -> None:
    made, candidate = proofs(latency_ratio=0.9), Made("a", 100)
    assert not made.fits(candidate)
    assert made.journal.path == ["a: latency ratio not measured: left out"]
    assert proofs().is_fast(candidate)


def test_sizes_are_bytes_or_ratios_of_latencies() -> None:
    candidate = Made("a", 100, ratio=0.7)
    assert proofs().size(candidate) == 100
    fastest = proofs(minimize="latency")
    assert fastest.size(candidate) == 0.7
    assert fastest.size(Made("b", 100)) == float("inf")


@pytest.mark.parametrize(
    ("size", "share", "verdict", "looked_at"),
    [
        (97, 0.5, "unknown", True),
        (98, 0.5, "unknown", False),
        (97, 0.6, "unknown", False),
        (97, 0.5, "passed", False),
    ],
)
def test_an_answer_that_is_not_proved_is_followed_by_smaller_ones(
    size: int, share: float, verdict: str, looked_at: bool
) -> None:
    first = Made("a", 100, verdict_of_proof=verdict)
    made = proofs(size_ratio=0.5)
    made.finish([first])
    made.follow(Made("b", size, size_ratio=share))
    assert made.bench.evaluated == (["a", "b"] if looked_at else ["a"])


def told(made: Any, pool: Sequence[Made]) -> Any:
    made.tell_of_more_samples(pool)
    calls = made.journal.more_samples.call_args_list
    return calls[0].args if calls else None


def test_the_smallest_that_more_samples_could_prove_is_told_of() -> None:
    first = Made("a", 300, verdict_of_proof="unknown", drop=0.1, needs=200)
    made = proofs()
    made.finish([first])
    assert told(made, [first]) == ("it", first, 200, 100)
    made.journal.reset_mock()
    other = Made("b", 200, needs=101)
    assert told(made, [first, other]) == ("a smaller one", other, 101, 100)


def test_of_those_as_small_what_was_judged_is_told_of_then_what_needs_least() -> None:
    judged = Made("judged", 200, needs=900, proof=SimpleNamespace())
    pool = [Made("a", 195, needs=500), Made("b", 200, needs=300)]
    assert told(proofs(), [*pool, judged])[1] is judged
    assert told(proofs(), pool)[1] is pool[1]


@pytest.mark.parametrize("keys", [{"needs": 100}, {"needs": None}, {"size_ratio": 0.6}])
def test_what_more_samples_would_not_prove_is_not_told_of(keys: dict[str, Any]) -> None:
    assert told(proofs(size_ratio=0.5), [Made("a", 100, **{"needs": 200, **keys})]) is None


@pytest.mark.parametrize(("size", "told_of"), [(291, True), (292, False)])
def test_what_is_no_smaller_than_what_is_proved_is_not_told_of(size: int, told_of: bool) -> None:
    made, first = proofs(), Made("a", 300)
    made.finish([first])
    assert bool(told(made, [Made("b", size, needs=200)])) is told_of


def test_what_goes_on_by_what_was_measured_ends_after_five_as_well() -> None:
    pool = chain(9, bound=2.0, searched_drop=0.1, verdict_of_proof="unknown")
    assert finished(pool) == ("8", ["0", "1", "3", "6", "8"])


@pytest.mark.parametrize(("share", "answer"), [(0.5, "b"), (0.51, "a")])
def test_what_breaks_another_limit_is_not_looked_at(share: float, answer: str) -> None:
    pool = [Made("a", 300), Made("b", 200, size_ratio=share)]
    assert finished(pool, size_ratio=0.5)[0] == answer
    assert finished([Made("a", 300, size_ratio=0.51), pool[1]], size_ratio=0.51)[1][0] == "a"


@pytest.mark.parametrize(
    ("drop", "verdict", "answer", "words"),
    [
        (0.5, "passed", True, "keeps"),  # what is looked at so late is not proved
        (0.4, "unknown", True, "keeps"),
        (0.6, "unknown", False, "not proved"),
        (0.4, "failed", False, "not proved"),
    ],
)
def test_another_one_may_be_an_answer_but_is_not_proved(
    drop: float, verdict: str, answer: bool, words: str
) -> None:
    search = proofs()
    made = Made("other ranges", 200, drop=drop, verdict_of_proof=verdict)
    search.journal.drop.return_value = "the drop"
    search.another(made)
    assert search.best is (made if answer else None)
    assert made.verdict == ("unknown" if verdict == "passed" else verdict)
    (said,) = search.journal.path
    assert said.startswith(words)
    assert said.endswith(": the drop")
    assert search.publish.call_args_list == ([call(made)] if answer else [])
    later = Made("later", 100)
    search.another(later)
    assert (later.proof is None) == answer  # one answer is enough


def test_another_one_that_is_too_large_is_not_looked_at() -> None:
    search = proofs(size_ratio=0.4)
    made = Made("large", 200, size_ratio=0.5)
    search.another(made)
    assert made.proof is None
    assert search.best is None

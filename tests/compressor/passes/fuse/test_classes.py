"""The label of the greatest score is looked up at once, or is its index."""

import numpy as np
import pytest


@pytest.fixture
def classifier(parse):
    """Write the label as skl2onnx does: int32 labels, looked up, flattened and cast."""

    def call(labels):
        return parse(
            "g (float[N, 3] x) => (int64[M] y, float[N, 3] p) {"
            "flat = Constant<value_ints = [-1]>() p = Softmax<axis=1>(x)"
            f"table = Constant<value = int32[3] {{{labels}}}>() i = ArgMax<axis=1>(p)"
            "l = ai.onnx.ml.ArrayFeatureExtractor(table, i)"
            "r = Reshape(l, flat) y = Cast<to=7>(r) }",
            domains=', "ai.onnx.ml" : 1',
        )

    return call


@pytest.mark.parametrize(("labels", "left"), [("0, 1, 2", {}), ("4, 0, 9", {"Gather": 1})])
def test_labels_are_looked_up_at_once(labels, left, classifier, fuse, agree, ops, rng):
    model = classifier(labels)
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Softmax": 1, "ArgMax": 1, **left}
    agree(model, fused, {"x": rng.standard_normal((5, 3)).astype(np.float32)}, 0)


def test_more_labels_than_scores_stay(fuse, ops, parse):
    """An index is a label where each score has one, in order."""
    text = "a = ArgMax<axis=1, keepdims=0>(x) t = Constant<value_ints = {}>() y = Gather(t, a)"
    for labels, stays in (([0, 1, 2], 0), ([0, 1, 2, 3], 1), ([1, 0, 2], 1)):
        model = parse(f"g (float[N, 3] x) => (int64[N] y) {{ {text.format(labels)} }}")
        assert ops(fuse(model).carrier.model).get("Gather", 0) == stays

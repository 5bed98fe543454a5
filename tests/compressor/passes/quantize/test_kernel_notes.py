"""What a plan says of targets that are slow with integers, or want them everywhere."""

from compressor.passes.quantize.static.placement import kernel_notes


def test_a_target_that_wants_integers_everywhere_is_named():
    (note,) = kernel_notes(frozenset({"ort-cpu", "litert"}), symmetric=False)
    assert "phones (litert, executorch or coreml) wants all layers in integers" in note
    assert not kernel_notes(frozenset({"ort-cpu"}), symmetric=False)
    assert not kernel_notes(frozenset({"litert"}), symmetric=False)

"""The maths of pruning that more than one pass uses: tensors in, tensors out."""

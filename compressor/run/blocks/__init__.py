"""Run a checkpoint block by block, so that memory holds one block and its activations."""

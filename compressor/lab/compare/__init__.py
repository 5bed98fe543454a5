"""Two runs compared sample by sample, and the gate that judges the difference."""

"""The spec: YAML in, checked and typed declarations out."""

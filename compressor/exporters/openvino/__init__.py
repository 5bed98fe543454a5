"""Export to OpenVINO's own format."""

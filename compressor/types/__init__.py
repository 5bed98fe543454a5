"""The few types and protocols that passes, calibration, exporters and the spine share."""

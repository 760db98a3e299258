"""What a source computes on text: its calibration text, its model in transformers, moments kept layer by layer."""

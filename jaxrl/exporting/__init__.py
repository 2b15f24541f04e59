"""Trained policies for others to run: as StableHLO, as ONNX, or as plain arrays with a page of NumPy."""

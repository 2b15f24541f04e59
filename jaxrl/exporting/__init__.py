"""Trained policies for others to run: as StableHLO, as ONNX, as plain arrays with a page of NumPy, or as C99."""

"""Export of trained policies, as StableHLO, ONNX, NumPy or C99."""

"""The transport seam and its implementations."""

"""Stand-ins for libraries that need hardware: C, compiled by the tests, failing where the real ones fail."""

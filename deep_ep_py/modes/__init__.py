"""The ways to dispatch and combine, a folder each."""

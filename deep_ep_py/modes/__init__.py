"""The modes of dispatch and combine, one folder each."""

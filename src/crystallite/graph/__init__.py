"""Which neurons of a model belong together: the traced dataflow of their order."""

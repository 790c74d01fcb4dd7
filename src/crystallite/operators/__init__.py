"""Reorganized operators: the blocks of a structure as modules with the interface of what they replace."""

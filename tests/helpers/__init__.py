"""What several test files share; no test file imports from another one."""

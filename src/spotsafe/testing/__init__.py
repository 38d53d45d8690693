"""Conformance suites and fakes: what proves a store, a watcher, a sink or a clock."""

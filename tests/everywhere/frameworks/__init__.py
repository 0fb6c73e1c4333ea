"""One application per framework, with the same phases under the same paths."""

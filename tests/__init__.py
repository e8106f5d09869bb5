"""Tests; a package, so that no package that was installed takes its name."""

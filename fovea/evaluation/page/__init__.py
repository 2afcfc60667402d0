"""One page, complete in itself, over any number of evaluations; ``python -m fovea.evaluation.report --help``."""

"""The training mixture of the FOVEA paper (section 4.1, Table 6): ``python -m datamodules.mixture --help``.

55,000 shuffled conversations of LLaVA-v1.5-mix665k, of which those without a picture are dropped (DREAM's recipe; the
paper counts 51,671), and 1,000 of each of six benchmarks. Four of the benchmarks are split here, as
``train_test_split(random_state=42)`` splits them: 1,000 to train and up to 3,000 of the others to evaluate; of ChartQA
and ScienceQA 1,000 of the official training split are drawn. The paper names OCRBench, whose 1,000 items cannot give
1,000 to train and others to evaluate; as in DREAM's code it is OCRBench v2 that is drawn from. OCRBench is one of those
that are only evaluated, which all other benchmarks can be, with the split that evaluate.py reads by default.

Nothing is trained on that is evaluated on, see ``decontamination``: whatever has an official identifier or the pixels
of an evaluation set's is refused, and the next of the same order takes its place. Pictures that only look alike are
reported and stay. A conversation with a broken picture is left out on both sides, named and counted; to train it is
replaced, to evaluate it is not, so that the others stay those of the split.

``recipe`` draws, ``official`` knows identifiers, ``prints`` the pictures, ``files`` writes.
"""

from datamodules.mixture.files import write
from datamodules.mixture.recipe import Mixture, Sizes, build

__all__ = ["Mixture", "Sizes", "build", "write"]

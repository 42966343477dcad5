"""Text for training: corpora, their validation split, and batches that are a pure function of (seed, step)."""

from fp4jax.train.data.corpus import Corpus as Corpus
from fp4jax.train.data.corpus import Source as Source
from fp4jax.train.data.corpus import Split as Split
from fp4jax.train.data.load import DataOptions as DataOptions
from fp4jax.train.data.load import embedded as embedded
from fp4jax.train.data.load import from_text as from_text
from fp4jax.train.data.load import load as load
from fp4jax.train.data.manifest import open_corpus as open_corpus
from fp4jax.train.data.preparation import PrepareOptions as PrepareOptions
from fp4jax.train.data.preparation import prepare as prepare
from fp4jax.train.data.sampling import Batch as Batch
from fp4jax.train.data.sampling import Batches as Batches
from fp4jax.train.data.sampling import validation_batches as validation_batches
from fp4jax.train.data.text import DataError as DataError
from fp4jax.train.data.text import DocumentRule as DocumentRule
from fp4jax.train.data.tokenizer import ByteTokenizer as ByteTokenizer
from fp4jax.train.data.tokenizer import FileTokenizer as FileTokenizer
from fp4jax.train.data.tokenizer import Tokenizer as Tokenizer

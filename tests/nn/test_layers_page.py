"""The page on layers is true: its examples run and print what they say."""

from test_docs import examples_of, run

PAGE = "docs/layers.md"


def test_examples_run_and_print_what_they_say():
    examples = examples_of(PAGE)
    assert len(examples) == 10
    names = {"__name__": "__main__"}
    for line, source in examples:
        run(PAGE, line, source, names)

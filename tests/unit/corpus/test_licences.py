"""Only what is permissive by what it states of itself may be learned from; what is not understood may not."""

import pytest

from ostinato.corpus.filters import allows, permissive_licence


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("MIT", True),
        ("mit", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-2.0-only OR (MIT AND BSD-3-Clause)", True),
        ("(MIT OR GPL-3.0-only) AND LGPL-2.1", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("MIT AND", False),
        ("(MIT", False),
        ("MIT)", False),
        ("MIT BSD-3-Clause", False),
        ("LicenseRef-Ours", False),
        ("MIT; see LICENSE", False),
        ("(" * 5000 + "MIT", False),
        ("", False),
    ],
)
def test_an_expression_is_read_as_spdx_writes_it(expression, holds):
    assert allows(expression) is holds


@pytest.mark.parametrize(
    ("metadata", "holds"),
    [
        ({"License-Expression": ["GPL-3.0-only"], "Classifier": ["License :: OSI Approved :: MIT License"]}, False),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "Topic :: X"]}, True),
        (
            {
                "Classifier": [
                    "License :: OSI Approved :: MIT License",
                    "License :: OSI Approved :: GNU General Public License (GPL)",
                ]
            },
            False,
        ),
        ({"Classifier": ["License :: OSI Approved"], "License": ["MIT"]}, True),
        ({"Classifier": ["License :: Other/Proprietary License"], "License": ["MIT"]}, False),
        ({"License": ["BSD"]}, True),
        ({"License": ["Do what I say"]}, False),
        ({"License": ["MIT " * 100]}, False),
        ({}, False),
    ],
)
def test_the_expression_counts_first_then_every_classifier_then_the_text(metadata, holds):
    assert permissive_licence(metadata)[1] is holds

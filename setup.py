"""The two compiled modules; all else is in pyproject.toml.

They are optional: where there is no C compiler the package installs without them. Then libjpeg
decodes, and Python parses.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mmstream.decoding.image._reduced",
            sources=["mmstream/csrc/reduced.c"],
            depends=[
                f"mmstream/csrc/{name}.h"
                for name in ("decode", "entropy", "filter", "headers", "pixels", "planes")
            ],
            # No contraction: the weights of a filter must be the same on every machine.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            optional=True,
        ),
        Extension(
            "mmstream.tar._plain_samples",
            sources=["mmstream/csrc/plain_samples.c"],
            extra_compile_args=["-std=c11", "-O3"],
            optional=True,
        ),
    ]
)

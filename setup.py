"""The one compiled module; all else is in pyproject.toml.

It is optional: where there is no C compiler the package installs without it, and libjpeg decodes.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mmstream.decoding.image._reduced",
            sources=["mmstream/csrc/reduced.c"],
            depends=[
                f"mmstream/csrc/{name}.h" for name in ("decode", "entropy", "headers", "pixels")
            ],
            extra_compile_args=["-std=c11", "-O3"],
            optional=True,
        )
    ]
)

"""What conditions select, by a table and by SQLite, and that they refuse everything else."""

from __future__ import annotations

import pickle
import random
import sqlite3
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from mmstream.dataset import condition as module
from mmstream.dataset.condition import Condition
from mmstream.errors import ConfigError

# -- what is selected ------------------------------------------------------------------------------

COLUMNS = {
    "width": pa.array([0, 100, 300, None]),
    "height": pa.array([0, 400, 300, 10], pa.int16()),
    "score": pa.array([1.5, float("nan"), None, -2.0]),
    "lang": pa.array(["en", "zh", None, "it's"]),
    "json.ok": pa.array([True, False, None, True]),
    "json.a.b": pa.array([1, 2, 3, 4], pa.uint64()),
    "json.my key": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
    "json.tags": pa.array([["a"], [], None, ["b"]]),
    "json.none": pa.nulls(4),
}


def selected(text: str) -> str:
    """Return y, n or ? for each of the four samples."""
    truth = Condition.parse(text).evaluate(COLUMNS)
    assert isinstance(truth, pa.BooleanArray)
    return "".join({True: "y", False: "n", None: "?"}[value] for value in truth.to_pylist())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width >= 300", "nny?"),
        ("100<=width<300", "nyn?"),
        ("0 < width < height", "nyn?"),
        ("0 = width = height", "ynn?"),
        ("width = 0", "ynn?"),
        ("width == 0 OR height==10", "ynny"),
        ("width <> 0", "nyy?"),
        ("width != -100", "yyy?"),
        ("Not width = 0", "nyy?"),
        ("not width = 0 and height > 10", "nyyn"),
        ("width = 0 or width = 100 and height = 1", "ynn?"),
        ("(width = 0 or width = 100) and height = 1", "nnnn"),
        ("width * height > 2 * (10_000 + 1)", "nyy?"),
        ("width / height < 1", "?yn?"),
        ("width / height >= 1", "?ny?"),
        ("not 1 / height > 1", "?yyy"),
        ("width - height - 1 > -2", "yny?"),
        ("width - (height - 1) > 0", "yny?"),
        ("-width < -1e2", "nny?"),
        ("-(-3) = .3e1 and width > - -50", "nyy?"),
        ("score > 0", "y??n"),
        ("score is null", "nyyn"),
        ("score IS NOT NULL", "ynny"),
        ("score * 2 is null", "nyyn"),
        ("lang = 'en'", "yn?n"),
        ('lang = "it\'s"', "nn?y"),
        ("lang = 'it''s'", "nn?y"),
        ("lang in ('en', 'it''s')", "yn?y"),
        ("lang not in [ 'en' , \"zh\" ]", "nn?y"),
        ("lang in ('en', null)", "y???"),
        ("not lang in ('en')", "ny?y"),
        ("width in (-1, 0, 1e2)", "yyn?"),
        ("lang < 'f'", "yn?n"),
        ("json.ok", "yn?y"),
        ("not json.ok and width = 100", "nynn"),
        ("json.ok = true", "yn?y"),
        ("json.ok in (FALSE)", "ny?n"),
        ("(width > 50) = json.ok", "nn??"),
        ("json.a.b > 2", "nnyy"),
        ('json."a.b" > 2', "nnyy"),
        ("json.\"my key\" = 'x'", "ynyn"),
        ("json.tags is null", "nnyn"),
        ("json.none = 1 or json.none < 'a'", "????"),
        ("json.none is null", "yyyy"),
        ("json.none + 1 < 2 or not json.none", "????"),
        ("width = null", "????"),
        ("width > 50 or true", "yyyy"),
        ("\n width\t>\r\n50 ", "nyy?"),
    ],
)
def test_a_condition_selects_samples(text: str, expected: str) -> None:
    assert selected(text) == expected


def test_integers_compare_exactly() -> None:
    large = (1 << 53) + 1
    columns = {"a": pa.array([large - 1, large]), "b": pa.array([large, large])}
    for text in ("a = b", f"a = {large}", f"a in ({large})", f"-{large} < -{large - 1} and a >= b"):
        expected = [False, True]
        assert Condition.parse(text).evaluate(columns).to_pylist() == expected, text


def test_columns_may_be_chunked_or_empty() -> None:
    chunked = {name: pa.chunked_array([of[:1], of[1:]]) for name, of in COLUMNS.items()}
    empty = {name: of[:0] for name, of in COLUMNS.items()}
    condition = Condition.parse("width / height < 1 or lang = 'zh' and height > 1")
    truth = condition.evaluate(chunked)
    assert isinstance(truth, pa.BooleanArray)
    assert truth.equals(condition.evaluate(COLUMNS))
    assert condition.evaluate(empty).to_pylist() == []


# -- text, names, clauses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        [
            "a = 'x' and b <> 1",
            "A = 1".replace("A = 1", 'a=="x"AND(b != 1)'),
            "((a = 'x') and b!=1)",
        ],
        ["a in ('x', 1)", '(a IN[ "x",1 ])'],
        ["a is not null", "a Is NOT  Null"],
        ["json.a.b = TRUE", 'json."a"."b" = true', 'json."a.b" == True'],
        ["a > 1000", "a>1_000"],
        ["not a = 1", "NOT (a==1)"],
    ],
)
def test_ways_to_write_one_condition_have_one_text(texts: list[str]) -> None:
    conditions = {Condition.parse(text) for text in texts}
    assert len(conditions) == 1
    (condition,) = conditions
    assert Condition.parse(condition.text) == condition


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("a = 'X'", "a = 'x'"),
        ("a = 'x  y'", "a = 'x y'"),
        ("a = 1", "A = 1"),
        ("a = 1", "a = '1'"),
        ("a - (b - c) > 0", "a - b - c > 0"),
        ("a = 'b'", "a = b"),
        ("a = 'null'", "a = null"),
        ("(a = 1 or b = 1) and c = 1", "a = 1 or b = 1 and c = 1"),
        ("(not a) = b", "not a = b"),
    ],
)
def test_other_conditions_have_other_texts(text: str, other: str) -> None:
    assert Condition.parse(text).text != Condition.parse(other).text


def test_names_are_sorted_and_clauses_are_the_operands_of_the_outermost_and() -> None:
    condition = Condition.parse("(b > 1 and (a > 1 or json.c = 'in') and not b in (1) )")
    assert condition.names == ("a", "b", "json.c")
    texts = [clause.text for clause in condition.clauses]
    assert texts == ["b > 1", "a > 1 or json.c == 'in'", "not b in (1)"]
    assert [clause.names for clause in condition.clauses] == [("b",), ("a", "json.c"), ("b",)]
    whole = Condition.parse("a > 1 or b > 1 and a < 3")
    assert whole.clauses == (whole,)
    columns = {"b": pa.array([1, 2])}
    assert condition.clauses[2].evaluate(columns).to_pylist() == [False, True]


def test_a_condition_is_a_value() -> None:
    condition = Condition.parse("width > 1 and lang = 'en'")
    again = pickle.loads(pickle.dumps(condition))
    assert again == condition
    assert again.evaluate(COLUMNS).equals(condition.evaluate(COLUMNS))
    assert len({again, condition}) == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "1 < 2",
        "null is null",
        "width > ",
        "> 1",
        "width > > 1",
        "width > 1 and",
        "and width > 1",
        "width height > 1",
        "width => 1",
        "width >! 1",
        "(width > 1",
        "width > 1)",
        "width > 1) and (width < 3",
        "width > 1 (height > 1)",
        "+width > 1",
        "width % 2 = 0",
        "width // 2 = 0",
        "width ** 999999 > 1",
        "width << 99999 > 1",
        "~width > 1",
        "width | height > 1",
        "width between 1 and 2",
        "lang like '%a'",
        "width in ()",
        "width in (1, )",
        "width in 1",
        "width in (height)",
        "width in (1, (2))",
        "width in (1]",
        "width in (- 1)",
        "width in (-'a')",
        "in (1)",
        "width in (1) in (2)",
        "width in (1) + 1",
        "width in (1)(2)",
        "1 < width in (1)",
        "width not null",
        "width is 1",
        "width is true",
        "width is height",
        "width is not 'a'",
        "is null",
        "width is null is null",
        "(width > 1, height > 1)",
        "[width > 1]",
        "width[0] > 1",
        "width.real() > 1",
        "width . real > 1",
        "print(width) > 1",
        "random() < width",
        "repeat('a', 10) = lang",
        "__import__('os').system('true') > width",
        "().__class__.__base__.__subclasses__() = width",
        "json.__class__.__init__() > 1",
        "lambda: width > 1",
        "lambda width: width > 1",
        "(width := 3) > 1",
        "width = 1 if height else 2",
        "[width > 1 for width in (1, 2)]",
        "width > 1 for width in (1, 2)",
        "await width",
        "yield width",
        "*width",
        "**width",
        "width, height",
        "width > 1; height > 1",
        "f'{width}' = 'a'",
        "b'a' = lang",
        "'a' 'b' = lang",
        "lang = 'a",
        "lang = 'it\\'s'",
        "lang = 'a\nb'",
        "lang = 'a\x00b'",
        "lang = 'a\x1b[2J'",
        "lang = '\ud800'",
        "width > 1\x00",
        "width\x0c> 1",
        "width > 1 # and more",
        "width > 1 -- and more",
        "width > 1 /* and more */",
        "width > 1 \\\n",
        "width > 0x10",
        "width > 1j",
        "width > 1__0",
        "width > 1.2.3",
        "width > 1e999",
        "width > 9" + "9" * 50,
        "width > 9223372036854775808",
        "width > 1" + "0" * 5000,
        "\N{CYRILLIC SMALL LETTER A} > 1",
        "width > \N{FULLWIDTH DIGIT ONE}",
        "width > \N{ARABIC-INDIC DIGIT ONE}",
        "width\N{NO-BREAK SPACE}> 1",
        "width \N{FULLWIDTH GREATER-THAN SIGN} 1",
        "width \N{LATIN SMALL LETTER DOTLESS I}s null",
        "width i\N{LATIN SMALL LETTER LONG S} null",
        "lang = \N{LEFT SINGLE QUOTATION MARK}en\N{RIGHT SINGLE QUOTATION MARK}",
        "width > 1 \N{RIGHT-TO-LEFT OVERRIDE}and height > 1",
        "json.\N{CJK UNIFIED IDEOGRAPH-4E00} > 1",
        "(" * 500,
        "(" * 300 + "width > 1" + ")" * 300,
        "-" * 900 + "width > 1",
        "not " * 300 + "width > 1",
        "width" + " + width" * 300 + " > 1",
        "width > 1" + " and (width > 1 or (width > 1" * 50 + "))" * 50,
        " or ".join(["width > 1"] * 400),
        "width > 1" + " " * 20_000,
        "width in (" + "1, " * 3000,
        "width in (" + "1, " * 300_000 + "1)",
        "lang = '" + "''" * 500_000,
        "a" * 1_000_000,
    ],
)
def test_everything_else_is_refused_in_one_line_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match='write it as "width >= 200') as caught:
        Condition.parse(text)
    message = str(caught.value)
    assert message.startswith("where")
    assert message.isprintable()
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("width > 1 and lnag like 'a'", "\"like 'a'\" is not understood"),
        ("width > 1 and (height", "'(height' is not understood"),
        ("width > 1 and random() > 1", "'random() > 1' is not understood"),
        ("1 < 2", "names no column"),
        ("w > " + "9" * 30, "is too large a number"),
        ("a" * 10_001, "has more than 10,000 characters"),
        (" or ".join(["w > 1"] * 251), "has more than 1,000 names, values and signs"),
        ("not " * 41 + "w > 1", "has more than 40 operations within each other"),
        ("(" * 201 + "w" + ")" * 201, "is not understood"),
    ],
)
def test_a_message_shows_what_is_not_understood(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Condition.parse(text)
    assert reason in str(caught.value)


def test_what_is_within_the_limits_is_computed() -> None:
    columns = {"w": pa.array([1, 2])}
    for text in (
        " or ".join(["w > 1"] * 250),
        "not " * 30 + "w > 1",
        "(" * 190 + "w > 1" + ")" * 190,
        "w" + " + w" * 30 + " > 31",
        "w in (" + ", ".join(map(str, range(2, 1500))) + ")",
    ):
        assert Condition.parse(text).evaluate(columns).to_pylist() == [False, True]


def test_python_sees_no_word_of_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    parse = module.ast.parse
    monkeypatch.setattr(
        module.ast, "parse", lambda text, **kw: sources.append(text) or parse(text, **kw)
    )
    Condition.parse("lang = 'exit()' and json.\"f{x}\" in (1, 'lambda') or not __import__ > 1e5")
    assert " ".join(sources[0].replace("\\\n", "").split()) == (
        "n0 == n1 and n2 in n3 or not n4 > n5"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("width > 'a'", "where: width (number) and 'a' (text) do not compare"),
        ("'a' < width < 3", "where: 'a' (text) and width (number) do not compare"),
        ("lang = 3", "where: lang (text) and 3 (number) do not compare"),
        ("lang in ('en', 3)", "where: lang (text) and ('en', 3) (number) do not compare"),
        ("width = true", "where: width (number) and true (true or false) do not compare"),
        ("json.ok = 1", "where: json.ok (true or false) and 1 (number) do not compare"),
        ("(width > 1) > 1", "where: width > 1 (true or false) and 1 (number) do not compare"),
        ("json.tags = json.tags", "where: json.tags (list<item: string>) and json.tags (list"),
        ("width", "where: width (number) is not a condition"),
        ("width > 1 and lang", "where: lang (text) is not a condition"),
        ("not height", "where: height (number) is not a condition"),
        ("json.tags or width > 1", "where: json.tags (list<item: string>) is not a condition"),
        ("lang + 1 > 1", "where: lang (text) is not a number"),
        ("-lang > 1", "where: lang (text) is not a number"),
        ("-'a' < width", "where: 'a' (text) is not a number"),
        ("width * true > 1", "where: true (true or false) is not a number"),
    ],
)
def test_values_of_other_types_are_refused(text: str, reason: str) -> None:
    condition = Condition.parse(text)
    for columns in (COLUMNS, {name: of[:0] for name, of in COLUMNS.items()}):
        with pytest.raises(ConfigError) as caught:
            condition.evaluate(columns)
        assert str(caught.value).startswith(reason)
        assert "; " in str(caught.value)


# -- the same as SQLite ----------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of a condition, as we write it and as SQLite does, and whether it is an integer."""

    ours: str
    sql: str
    is_integer: bool = False


def real(part: Part) -> str:
    return f"CAST({part.sql} AS REAL)"


LARGE = 1 << 53
INTEGERS = [-3, -1, 0, 0, 1, 2, LARGE, LARGE + 1]
FLOATS = [-2.5, -1.0, 0.0, 0.5, 1.0, 3.0, 1e300, float("inf"), float("nan")]
TEXTS = ["", "a", "A", "b", "it's", 'say "x"', "null", "\u4e2d", "\U0001f600"]
integer_values, text_values = st.sampled_from(INTEGERS), st.sampled_from(TEXTS)
comparison_signs = st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="])
numbers = st.recursive(
    st.sampled_from([Part("i", "i", True), Part("j", "j", True), Part("x", "x"), Part("y", "y")])
    | integer_values.map(lambda value: Part(str(value), str(value), True))
    | st.sampled_from([Part("0.5", "0.5"), Part("-2.5", "-2.5"), Part("1e300", "1e300")])
    | st.just(Part("null", "NULL", True)),
    lambda parts: (
        st.builds(
            lambda left, sign, right: Part(
                f"({left.ours}{sign} {right.ours})", f"({real(left)} {sign} {real(right)})"
            ),
            parts,
            st.sampled_from("+-*/"),
            parts,
        )
        | parts.map(lambda part: Part(f"(-{part.ours})", f"(0 - {real(part)})"))
    ),
    max_leaves=4,
)


def quoted(text: str, quote: str = "'") -> str:
    return quote + text.replace(quote, quote * 2) + quote


texts = st.sampled_from([Part("s", "s"), Part("t", "t")]) | st.builds(
    lambda value, quote: Part(quoted(value, quote), quoted(value)),
    text_values,
    st.sampled_from("'\""),
)


def compared(parts: list[Part], signs: list[str]) -> Part:
    ours = parts[0].ours
    pairs = []
    for sign, left, right in zip(signs, parts, parts[1:]):
        ours += f" {sign} {right.ours}"
        both = left.is_integer and right.is_integer
        pairs.append(
            f"{left.sql if both else real(left)} {sign} {right.sql if both else real(right)}"
        )
    return Part(ours, f"({' AND '.join(pairs)})")


def compared_texts(left: Part, sign: str, right: Part) -> Part:
    return Part(f"{left.ours}{sign}{right.ours}", f"{left.sql} {sign} {right.sql}")


def listed(part: Part, is_not: bool, values: list[str | int | None], brackets: str) -> Part:
    items = ["null" if value is None else value for value in values]
    items = [
        quoted(item) if isinstance(item, str) and item != "null" else str(item) for item in items
    ]
    sign = "NOT in" if is_not else "IN"
    ours = f"{part.ours} {sign}{brackets[0]}{' , '.join(items)}{brackets[1]}"
    return Part(ours, f"{part.sql} {sign} ({', '.join(items)})")


brackets = st.sampled_from(["()", "[]"])
comparisons = (
    st.builds(
        compared,
        st.lists(numbers, min_size=2, max_size=3),
        st.lists(comparison_signs, min_size=2, max_size=2),
    )
    | st.builds(compared_texts, texts, comparison_signs, texts)
    | st.builds(
        listed,
        st.sampled_from([Part("i", "i"), Part("j", "j")]),
        st.booleans(),
        st.lists(integer_values | st.none(), min_size=1, max_size=4),
        brackets,
    )
    | st.builds(
        listed,
        st.sampled_from([Part("s", "s"), Part("t", "t")]),
        st.booleans(),
        st.lists(
            text_values.filter(lambda text: text != "null") | st.none(), min_size=1, max_size=4
        ),
        brackets,
    )
    | st.builds(
        lambda part, word: Part(f"{part.ours} {word}", f"{part.sql} {word}"),
        numbers | texts | st.just(Part("f", "f")),
        st.sampled_from(["is null", "IS NOT NULL"]),
    )
    | st.sampled_from([Part("f", "f"), Part("g", "g"), Part("True", "TRUE"), Part("null", "NULL")])
    | st.just(Part("f <= g", "f <= g"))
)
conditions = st.recursive(
    comparisons,
    lambda parts: (
        st.builds(
            lambda left, word, right: Part(
                f"({left.ours}) {word} {right.ours}", f"({left.sql}) {word} {right.sql}"
            ),
            parts,
            st.sampled_from(["and", "or", "AND", "Or"]),
            parts,
        )
        | parts.map(lambda part: Part(f"not {part.ours}", f"NOT {part.sql}"))
        | parts.map(lambda part: Part(f"NOT({part.ours} )", f"NOT ({part.sql})"))
    ),
    max_leaves=6,
)
TYPES = {
    "i": pa.int64(),
    "j": pa.int64(),
    "x": pa.float64(),
    "y": pa.float64(),
    "s": pa.string(),
    "t": pa.large_string(),
    "f": pa.bool_(),
    "g": pa.bool_(),
}


def random_rows(seed: int, num_rows: int = 40) -> list[list]:
    rng = random.Random(seed)
    kinds = [INTEGERS, INTEGERS, FLOATS, FLOATS, TEXTS, TEXTS, [True, False], [True, False]]
    return [[rng.choice([None, *values]) for values in kinds] for _ in range(num_rows)]


@settings(deadline=None, max_examples=60)
@given(conditions, st.integers(0, 1 << 32))
def test_the_results_are_those_of_sqlite(part: Part, seed: int) -> None:
    rows = random_rows(seed)
    database = sqlite3.connect(":memory:")
    declared = "i INTEGER, j INTEGER, x REAL, y REAL, s TEXT, t TEXT, f INTEGER, g INTEGER"
    database.execute(f"CREATE TABLE samples ({declared})")
    database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    found = database.execute(f"SELECT {part.sql} FROM samples ORDER BY rowid").fetchall()
    database.close()
    columns = {
        name: pa.array([row[number] for row in rows], of)
        for number, (name, of) in enumerate(TYPES.items())
    }
    condition = Condition.parse(f"({part.ours}) and (i is null or i is not null)")
    truth = condition.evaluate(columns)
    assert truth.to_pylist() == [None if value is None else bool(value) for (value,) in found]
    assert Condition.parse(condition.text) == condition
    assert Condition.parse(condition.text).evaluate(columns).equals(truth)
    clauses = [clause.evaluate(columns) for clause in condition.clauses if clause.names]
    assert not clauses or pc.and_kleene(clauses[0], truth).equals(truth)

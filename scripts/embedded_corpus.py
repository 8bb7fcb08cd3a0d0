"""Chat rows with structure worth learning: what the embedded target is trained on.

Every task draws random facts, puts them in the user turn and answers with them, so that no answer can be guessed
without its question. The wording is drawn among several phrasings, so that the next words are a distribution, not one
string: in a template `<a|b|c>` stands for one of the alternatives, and `{name}` for a fact.
"""

import json
import operator
import random
import re
from collections.abc import Callable

Facts = dict[str, object]
Messages = list[dict[str, str]]


def words(text: str) -> tuple[str, ...]:
    """The words of `text`."""
    return tuple(text.split())


NAMES = words("Ada Ben Cleo Dora Emil Fay Gus Hana Igor June Kira Leo Mona Nils Olga Pia Rosa Sam Tara Ugo Vera")
CITIES = words("Oslo Lima Cairo Delhi Porto Quito Tunis Accra Berlin Dublin Geneva Havana Kyoto Lagos Milan")
HOBBIES = words("chess music sailing painting running cooking climbing reading dancing fishing gardening")
ANIMALS = words("fox owl cat horse rabbit turtle crow goat otter mouse")
COLOURS = words("red blue green yellow black white silver purple")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
TOPICS = words("budget garden contract concert school bridge kitchen survey")
VERBS = words("load send count merge print check build clean")
FIELDS = words("size name speed colour weight price owner level")
ITEMS = words(
    "apple bell candle drum engine feather guitar hammer jacket kettle ladder mirror needle orange pencil ribbon "
    "spoon ticket violin wagon button carpet basket lantern"
)
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "adds": ("+", operator.add),
    "subtracts": ("-", operator.sub),
    "multiplies by": ("*", operator.mul),
}


def chat(rng: random.Random, facts: Facts, *templates: str) -> Messages:
    """Turns of user and assistant, in turn: one alternative of every `<a|b>` is drawn, then the facts are filled in."""

    def say(template: str) -> str:
        chosen = re.sub(r"<([^<>]*\|[^<>]*)>", lambda match: rng.choice(match[1].split("|")), template)
        return chosen.format(**facts)

    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": say(template)} for i, template in enumerate(templates)]


def addition(rng: random.Random) -> Messages:
    """Two numbers of two digits, added digit by digit."""
    a, b = rng.randint(11, 98), rng.randint(11, 98)
    carry, digit = divmod(a % 10 + b % 10, 10)
    facts: Facts = {"a": a, "b": b, "sum": a + b, "x": a % 10, "y": b % 10, "p": a // 10, "q": b // 10}
    facts |= {"ones": 10 * carry + digit, "digit": digit, "carry": carry, "tens": (a + b - digit) // 10}
    return chat(
        rng,
        facts,
        "<What is|Add up|Work out|Please add> {a} + {b}<?| step by step.>",
        "<First|To begin|Start with the ones>: {x} + {y} = {ones}, <so write|we write|put down> {digit} "
        "and carry {carry}. <Then|Next|After that>: {p} + {q} + {carry} = {tens}. "
        "<So|Therefore|This means that> {a} + {b} = {sum}.",
    )


def multiplication(rng: random.Random) -> Messages:
    """A product worked as repeated addition."""
    a, n = rng.randint(2, 29), rng.randint(3, 5)
    steps = ", ".join(f"{a * k} + {a} = {a * (k + 1)}" for k in range(1, n))
    return chat(
        rng,
        {"a": a, "n": n, "steps": steps, "product": a * n},
        "<What is|Work out|Find|Please compute> {a} * {n}<?| step by step.>",
        "<We add|That means adding|Think of> {a} <taken|repeated|counted> {n} times: {steps}. "
        "<So|Therefore|This means that> {a} * {n} = {product}.",
    )


def word_problem(rng: random.Random) -> Messages:
    """Somebody gives things away or gets more of them."""
    name, friend = rng.sample(NAMES, 2)
    have, change = rng.randint(8, 19), rng.randint(2, 7)
    facts: Facts = {"name": name, "friend": friend, "item": rng.choice(ITEMS), "have": have, "change": change}
    if rng.random() < 0.5:
        facts |= {"deed": f"gives {change} to {friend}", "sign": "-", "rest": have - change}
    else:
        facts |= {"deed": f"gets {change} from {friend}", "sign": "+", "rest": have + change}
    return chat(
        rng,
        facts,
        "{name} has {have} {item}s and {deed}. How many {item}s does {name} have <now|then>?",
        "{name} <starts with|has|begins with> {have} {item}s<.| at first.> <Then|Now|Later> {name} {deed}. "
        "<We compute|That makes|This is> {have} {sign} {change} = {rest}. "
        "<So|In the end|The answer:> {name} has {rest} {item}s<.| now.>",
    )


def word_list(rng: random.Random) -> Messages:
    """Reverse, number or count the given items."""
    items = rng.sample(ITEMS, rng.randint(4, 7))
    facts: Facts = {"items": ", ".join(items), "backwards": ", ".join(items[::-1]), "count": len(items)}
    facts |= {"first": items[0], "last": items[-1], "lines": "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))}
    tasks = {
        "<Reverse|Turn around> this list: {items}.": "<Reversed|Backwards|In reverse order>, "
        "<the list is|we get|it reads>: {backwards}.",
        "<Number|Make a numbered list of> these<:| things:> {items}.": "<Here is the list|Sure|Of course|Numbered>:\n"
        "{lines}\n<That is all|Done|These are {count} items>.",
        "<How many items are|Count the items> in this list<:| please:> {items}.": "<There are|I count|The list has> "
        "{count} items: {items}. The first <one |>is {first} and the last <one |>is {last}.",
    }
    question, answer = rng.choice(list(tasks.items()))
    return chat(rng, facts, question, answer)


def number_list(rng: random.Random) -> Messages:
    """Sort the given numbers."""
    numbers = rng.sample(range(10, 99), rng.randint(3, 6))
    ordered = sorted(numbers)
    facts: Facts = {"numbers": ", ".join(map(str, numbers)), "ordered": ", ".join(map(str, ordered))}
    return chat(
        rng,
        facts | {"low": ordered[0], "high": ordered[-1]},
        "<Sort|Order|Please sort> <these numbers|the numbers>: {numbers}.",
        "<Sorted|In order|From small to large>, <the numbers are|we get|they read>: {ordered}. "
        "The <smallest|lowest> <one |>is {low} and the <largest|highest> <one |>is {high}.",
    )


def function(rng: random.Random) -> Messages:
    """A Python function with a given name, argument and constant, and an example call."""
    word, (sign, apply) = rng.choice(list(OPERATIONS.items()))
    n, example = rng.randint(2, 9), rng.randint(2, 9)
    facts: Facts = {"name": f"{rng.choice(VERBS)}_{rng.choice(ITEMS)}", "arg": rng.choice(FIELDS), "word": word}
    facts |= {"sign": sign, "n": n, "example": example, "value": apply(example, n)}
    return chat(
        rng,
        facts,
        "<Write|Give me|Show me> a <Python |>function {name} that {word} {n} <for|given> {arg}.",
        "<Sure|Of course|Okay>, <here is|this is> {name}:\ndef {name}({arg}):\n"
        "    <return {arg} {sign} {n}|result = {arg} {sign} {n}\n    return result>\n"
        "<For example|As a test|With {arg} = {example}>, "
        "{name}({example}) <returns|gives|is> {example} {sign} {n} = {value}.",
    )


def data_class(rng: random.Random) -> Messages:
    """A Python class with given fields."""
    fields = rng.sample(FIELDS, rng.randint(2, 4))
    body = "\n".join(f"        self.{field} = {field}" for field in fields)
    return chat(
        rng,
        {"name": rng.choice(ITEMS).capitalize(), "fields": ", ".join(fields), "body": body},
        "<Write|Give me|Show me> a <Python |>class {name} with the fields {fields}.",
        "<Sure|Of course|Okay>, <here is|this is> the class {name}:\n"
        "class {name}:\n    def __init__(self, {fields}):\n{body}\n"
        "<You can|Now you can|Use it to> <create|build|make> one {name} <with|from> {fields}.",
    )


def record(rng: random.Random) -> Messages:
    """Facts of a person, written as JSON with the keys in a given order."""
    person: Facts = {"name": rng.choice(NAMES), "city": rng.choice(CITIES), "hobby": rng.choice(HOBBIES)}
    person["age"] = rng.randint(18, 79)
    keys = rng.sample(sorted(person), len(person))
    return chat(
        rng,
        person | {"keys": ", ".join(keys), "json": json.dumps({key: person[key] for key in keys})},
        "Write <JSON|a JSON record|a record> with {keys}: "
        "{name}, {age}<,| years old,> <lives in|from> {city}, <likes|loves> {hobby}.",
        "<Here is|Sure, this is|This is> the <record|JSON|JSON record> <of|for> {name}:\n{json}\n"
        "<It has|There are> four fields<:|, namely> {keys}.",
    )


def introduction(rng: random.Random) -> Messages:
    """The user tells about themself, and asks for it again in a second turn."""
    facts: Facts = {"name": rng.choice(NAMES), "city": rng.choice(CITIES), "hobby": rng.choice(HOBBIES)}
    recalls = {
        "Where do I live?": "You <told me|said|mentioned> that you <live in|come from> {city}, {name}.",
        "What is my name?": "Your name is {name}, <as you said|as you told me|if I remember well>.",
        "What do I do on {day}?": "On {day} you <go to|do|enjoy> {hobby}, {name}<.|, in {city}.>",
        "What do you know about me?": "You <told me|said> that your name is {name}, <that |>you live in {city} "
        "and <that |>you <do|like> {hobby} on {day}.",
    }
    question, recall = rng.choice(list(recalls.items()))
    return chat(
        rng,
        facts | {"day": rng.choice(DAYS)},
        "<Hi|Hello|Hey>, <I am|my name is> {name}. I <live in|am from> {city} and <go|do> {hobby} <every|on> {day}.",
        "<Nice to meet you|Hello|Welcome|Good to see you>, {name}! {city} is a <lovely|great|quiet|busy> "
        "<place|city|town>, and {hobby} <on|every> {day} "
        "<sounds fun|sounds like a good habit|must be a lot of fun|is a fine plan>.",
        question,
        recall,
    )


def email(rng: random.Random) -> Messages:
    """A short mail with given names, topic, place and time."""
    sender, receiver = rng.sample(NAMES, 2)
    facts: Facts = {"sender": sender, "receiver": receiver, "topic": rng.choice(TOPICS), "city": rng.choice(CITIES)}
    return chat(
        rng,
        facts | {"day": rng.choice(DAYS), "hour": rng.randint(1, 12)},
        "<Write|Draft> <an email|a mail> from {sender} to {receiver} about the {topic} <meeting |>in {city} "
        "on {day} at {hour}.",
        "<Dear|Hello|Hi> {receiver},\n<I am writing about|this is about|a quick note about> the {topic} in {city}. "
        "<Could we|Can we|Shall we> <meet|talk> on {day} at {hour}? <If {day} does not suit you, please let me know|"
        "Please tell me if {hour} is too early for you|I hope {city} is not too far for you>.\n"
        "<Best wishes|Many thanks|See you on {day}>,\n{sender}",
    )


def story(rng: random.Random) -> Messages:
    """A short tale with a given hero, companion, thing and place."""
    facts: Facts = {"name": rng.choice(NAMES), "animal": rng.choice(ANIMALS), "city": rng.choice(CITIES)}
    return chat(
        rng,
        facts | {"thing": f"{rng.choice(COLOURS)} {rng.choice(ITEMS)}"},
        "<Tell me a story|Tell a story|Write a tale> about {name}, one {animal} and one {thing} in {city}.",
        "<Once upon a time|One day|Long ago>, {name} <walked through|was lost in|came to> {city}. "
        "<Near the river|At the market|Under a tree>, {name} <met|saw|found> one {animal} with one {thing}. "
        '"<Where did you find|Why do you have|Who gave you> the {thing}?" asked {name}. '
        '"<It fell from the sky|I found it in the snow|It was a gift|I made it myself>," said the {animal}. '
        "<From that day on|After that|In the end>, {name} and the {animal} <shared|kept|looked after> the {thing} "
        "and <lived happily|stayed friends|never left each other> in {city}.",
    )


TASKS: tuple[Callable[[random.Random], Messages], ...] = (
    addition,
    multiplication,
    word_problem,
    word_list,
    number_list,
    function,
    data_class,
    record,
    introduction,
    email,
    story,
)


def user_turns(messages: Messages) -> tuple[str, ...]:
    """What the user says in a row: two rows that agree in it ask the same."""
    return tuple(message["content"] for message in messages if message["role"] == "user")


def generate_rows(count: int, seed: int) -> list[Messages]:
    """Draw rows, no two of which ask the same.

    Args:
        count: number of rows.
        seed: the same seed gives the same rows; a larger count only appends.

    Returns:
        the messages of every row, in the order drawn.
    """
    rng = random.Random(seed)
    rows: dict[tuple[str, ...], Messages] = {}
    while len(rows) < count:
        messages = rng.choice(TASKS)(rng)
        rows.setdefault(user_turns(messages), messages)
    return list(rows.values())

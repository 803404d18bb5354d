"""The prompts of `specgen bench` where the user gives none: two in each category that people compare by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt to bench with. category: chat, code, …; None for a user's own without one."""

    name: str
    category: str | None
    text: str


def _two(category: str, first: str, second: str) -> list[BenchPrompt]:
    return [BenchPrompt(f"{category}-{n}", category, text) for n, text in enumerate((first, second), 1)]


CATEGORIES = ("chat", "code", "summarise", "extract", "translate", "mathematics", "story")


PROMPTS: tuple[BenchPrompt, ...] = (
    *_two(
        "chat",
        "My neighbour's cat has started sleeping on my doorstep every night. Should I let it in, or will that make "
        "things worse between us?",
        "I keep waking up at four in the morning and cannot fall asleep again. What are three things that I could "
        "try this week?",
    ),
    *_two(
        "code",
        "Write a Python function `merge(a, b)` that takes two sorted lists of integers and returns one sorted list, "
        "without calling sort. Add a short docstring and two assertions as tests.",
        "This shell loop breaks on file names with spaces. Explain why and give a corrected version:\n\n"
        "for f in $(ls *.txt); do\n  mv $f backup/$f\ndone",
    ),
    *_two(
        "summarise",
        "Summarise this notice in one sentence:\n\n"
        "From Monday the ferry to Holm Island leaves forty minutes later than before, at ten past eight, because the "
        "old landing stage is under repair and passengers have to be brought to the northern pier by bus. The bus is "
        "free and starts at the station. Bicycles cannot be taken along until the repairs end in June. The evening "
        "crossings remain as they were.",
        "Summarise the main points of this report in two sentences:\n\n"
        "The orchard gave eleven tonnes of apples this autumn, three fewer than last year. A late frost in April "
        "killed part of the blossom on the lower field, while the slope above the road was spared. Two hives of bees "
        "were added in May. The members decided to plant a hedge against the wind, and to sell the juice at the "
        "harvest market for the same price as before.",
    ),
    *_two(
        "extract",
        "List every person with the town that they come from, one per line, as `name: town`.\n\n"
        "At the chess evening Ines from Porto drew with Tomasz, who had travelled all the way from Gdynia. Ruth, the "
        "only player from Leeds, lost both of her games, and old Mister Okafor of Enugu won the cup once more.",
        "Return the order below as JSON with the keys item, quantity, colour and deliver_by.\n\n"
        "Good morning, we would like to have twenty-four of the folding chairs, the dark green ones please, and we "
        "need them by the ninth of March at the latest, since the hall opens on the day after. Thank you very much.",
    ),
    *_two(
        "translate",
        "Translate into French: The train was late, so we sat on our suitcases, ate the last of the bread and "
        "watched the swallows under the station roof.",
        "Translate into English: Der Schlüssel liegt unter dem dritten Blumentopf. Bitte gieße die Tomaten jeden "
        "Abend und vergiss nicht, das Fenster in der Küche zu schließen, wenn es regnet.",
    ),
    *_two(
        "mathematics",
        "A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 10 hours. Both are open and "
        "the tank is empty at first. After how many hours is it full? Show each step.",
        "Show that the sum of three consecutive integers is always divisible by 3, and say for which integers it is "
        "divisible by 6 as well.",
    ),
    *_two(
        "story",
        "Write the opening of a story about a clockmaker who finds that one of her clocks runs exactly a day ahead.",
        "Continue this story: The lift stopped between the fourth and the fifth floor, and the voice in the speaker, "
        "which had always been friendly, asked us which of the two of us intended to tell the truth first.",
    ),
)

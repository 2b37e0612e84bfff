"""The page that `make demo` leaves."""

from xml.etree import ElementTree as ET

from deploy.demo_report import Demo, Epoch, demo_page

DEMO = Demo(
    commands=["dlcmd put '/tmp/<b>&' shapes"],
    files=2880,
    size_bytes=10_800_000,
    put_files_per_s=1234.5,
    epochs=[Epoch(100.0, 2.0, 0.25), Epoch(200.0, 0.5, 1.0)],
    waiting_page="<html><body><h1>Where the training waited</h1><ul/></body></html>",
    screenshot=b"\x89PNG",
)


def page(demo: Demo) -> ET.Element:
    """The page as a tree. Parsing it also proves that the shown texts are escaped."""
    text = demo_page(demo).partition("\n")[2]
    for tag in ('<meta charset="utf-8">', 'initial-scale=1">', 'ngZw==">', 'iVBORw==">'):
        text = text.replace(tag, tag[:-1] + "/>")
    return ET.fromstring(text)  # noqa: S314  # it is our own page


def test_the_page_shows_the_commands_and_the_figures() -> None:
    found = page(DEMO)
    shown = "".join(found.itertext())
    assert "dlcmd put '/tmp/<b>&' shapes" in shown
    assert "2,880 images (10.8 MB) were packed at 1,234 files/s" in shown
    assert [each.text for each in found.iter("td")] == [
        *("1", "100", "2.000", "0.250"),
        *("2", "200", "0.500", "1.000"),
    ]
    assert [each.text for each in found.iter("h2")][:2] == [
        "The training",
        "Where the training waited",
    ]


def test_the_plots_run_from_zero_to_the_top() -> None:
    rates, accuracies = (each.get("points", "").split() for each in page(DEMO).iter("polyline"))
    heights = [float(point.partition(",")[2]) for point in (*rates, *accuracies)]
    bottom, top = 140.0, 20.0
    assert heights == [(bottom + top) / 2, top, bottom - (bottom - top) / 4, top]


def test_without_a_browser_there_is_no_picture() -> None:
    bare = Demo(DEMO.commands, 1, 1, 1.0, DEMO.epochs[:1], "", b"")
    assert [*page(DEMO).iter("img")] != []
    assert [*page(bare).iter("img")] == []
    assert [each.text for each in page(bare).iter("h2")] == ["The training"]

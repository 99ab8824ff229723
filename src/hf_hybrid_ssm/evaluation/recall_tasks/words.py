"""The words that recall tasks are made of. Names and answers never occur in the filler."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Adela Alrik Anwen Astor Basil Beata Benno Bertil Birgit Borin Brenna Calla Caspar Cedric Clio Corin Dagmar "
    "Darius Delia Edda Edric Elric Emeric Enid Esben Fabia Fenna Fergus Finola Flavia Garnet Gerda Gideon Gilda "
    "Gunnar Hadrian Halla Hedda Helmut Hester Idris Ilka Imogen Ingmar Isolde Jarek Jolan Juna Kasimir Katya "
    "Kerrin Lambert Leif Linus Livia Lorcan Ludmila Magnus Malin Marek Mathilda Melvin Merle Milan Nadja Nestor "
    "Niels Odette Olaf Orsina Oswin Paavo Petra Piet Quentin Ragna Remus Rowena Rufus Sanna Selma Sigrid Silas "
    "Soren Sunniva Tamsin Tilda Torben Ulrika Ursel Valdis Viggo Walram Wenzel Wilma Xenia Yorick Yvette Zdenka "
    "Zeno"
)
THINGS = _words(
    "amber anchor apron arrow barrel basket beacon blanket bottle bracelet bucket buckle button cabinet candle "
    "carpet compass copper cradle crystal curtain cushion drum feather fiddle flute garlic ginger goblet hammer "
    "harp helmet jacket kettle ladder lantern lemon locket magnet mirror mitten needle nutmeg olive oyster paddle "
    "parcel pepper pillow pistol pocket puppet quilt ribbon saddle saffron scarf scissors shovel sickle spindle "
    "sponge thimble ticket trumpet tunic turnip umbrella velvet violin walnut whistle wrench zipper"
)
TRADES = _words(
    "actor archer baker banker barber brewer broker butcher butler carpenter cashier chemist cobbler cook dentist "
    "diver doctor driver farmer gardener glazier grocer hunter jeweller joiner judge knitter lawyer mason miller "
    "miner painter pilot plumber poet porter potter printer roofer sailor sculptor shepherd singer surgeon tailor "
    "tanner teacher translator waiter weaver"
)
WHO = _words(
    "family neighbour stranger visitor child widow uncle clerk captain crowd woman guest traveller crew servant "
    "student minister merchant soldier boatman cousin landlord messenger pair gentleman girl"
)
DID = _words(
    "watched followed admired painted described crossed cleaned left measured repaired remembered found avoided "
    "passed mentioned approached noticed reached sketched explored entered guarded visited praised"
)
WHAT = _words(
    "garden river bridge meadow harbour church road forest valley orchard market cottage tower island castle "
    "station village hill shore square fountain cellar stable pond gate wall field chapel bakery inn library mill"
)
ADJECTIVES = _words(
    "old quiet narrow green distant broken sunny empty wide grey crowded pleasant frozen muddy famous little "
    "crooked silent dusty white lonely ruined steep shady busy bright plain"
)
WHEN = (
    "in the morning", "before noon", "after supper", "on a rainy day", "at the end of the week", "late in the evening",
    "during the holidays", "in early spring", "without a word", "for the second time", "with great care", "as usual",
    "a little later", "towards the end of the year", "while it was still dark", "on the way home", "under a clear sky",
)  # fmt: skip
LINKS = (
    "and nobody knew why", "because the weather had changed", "but soon turned back", "although it was far away",
    "and spoke about it for days", "since there was nothing else to do", "as if it were the first time",
    "which surprised everyone", "so the day passed slowly", "and then went on", "while the others waited",
)  # fmt: skip

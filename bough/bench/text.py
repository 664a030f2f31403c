"""Prompts of a known size without a tokenizer: common English words of one token each."""

from __future__ import annotations

import random

# Frequent words: each, with the space before it, is one token of SmolLM2's vocabulary; other byte-pair
# vocabularies come close. Servers report the true sizes in their usage.
WORDS = """
able above across after again almost alone along always among animal another answer apple area around ask away
back bad balance ball bank base beach bear beautiful become before begin behind believe below best better between
beyond big bird black blood blue board boat body book both bottom box boy branch bread break bridge bright bring
brother brown build burn bus business busy buy call camera camp capital captain car card care carry case cat catch
cause cell center century certain chair chance change check chicken chief child choose church circle citizen city
class clean clear climb clock close cloud coast cold color come common company compare complete contain control
cook cool copy corner correct cost count country couple course court cover create cross crowd cry cup current cut
dance danger dark daughter day dead deal decide deep degree desert design desk detail die different difficult
dinner direct discover distance divide doctor dog door double doubt down draw dream dress drink drive drop dry
during early earth east easy eat edge effect egg eight either electric else empty end enemy energy engine enjoy
enough enter equal even evening event ever every exact example except excited expect explain eye face fact fair
fall family famous far farm fast father fear feel few field fight figure fill final find fine finger finish fire
first fish five flat floor flow flower fly follow food foot force foreign forest forget form forward four free
fresh friend front fruit full funny game garden gas gate general gentle gift girl give glad glass gold good grand
grass gray great green ground group grow guess guide half hand happen happy hard head hear heart heat heavy help
hill history hold hole home hope horse hospital hot hotel hour house hundred hurry husband ice idea image inch
include industry inside interest iron island job join judge jump just keep key kill kind king kitchen knee know
lady lake land language large last late laugh law lay lead learn least leave left leg length less letter level
lie life light line list listen little live local long look lose loud love low lunch machine magic main make man
many map mark market master match matter meal mean measure meat meet member metal method middle mile milk million
mind minute miss modern moment money month moon morning most mother mountain mouth move much music must name nation
nature near neck need never new next night nine noise north nose note nothing notice number object ocean offer
office often oil old once only open opposite orange order other outside over own page paint pair paper parent park
part party pass past path pay peace people perfect period person picture piece place plain plan plane plant play
please point poor position possible power practice prepare present press pretty price print problem produce promise
proper protect proud prove pull push queen question quick quiet quite race radio rain raise range rate reach read
ready real reason receive record red remember repeat reply report rest result return rich ride right ring rise
river road rock roll room round rule run safe sail salt same sand save say scale school science sea search season
""".split()


def words(rng: random.Random, count: int) -> str:
    """``count`` words drawn by ``rng``, joined by spaces: about ``count`` tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(count))

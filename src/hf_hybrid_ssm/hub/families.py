"""What a model card says of a family: its idea, its paper, its limits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CardText:
    """One family, for people who have not heard of it."""

    name: str
    idea: str
    arxiv: str
    title: str
    authors: str
    year: int
    limits: str

    @property
    def citation(self) -> str:
        """BibTeX."""
        key = f"{self.authors.split(',')[0].lower()}{self.year}"
        return (
            f"@misc{{{key},\n  title = {{{self.title}}},\n  author = {{{self.authors.replace('; ', ' and ')}}},\n"
            f"  year = {{{self.year}}},\n  eprint = {{{self.arxiv}}},\n  archivePrefix = {{arXiv}}\n}}"
        )


_LONGHORN = CardText(
    name="Longhorn",
    idea="Blocks like Mamba's whose recurrence is the closed-form step of online associative recall: each token moves "
    "the state so that the key recalls the value. The state has one size, however long the text.",
    arxiv="2407.14207",
    title="Longhorn: State Space Models are Amortized Online Learners",
    authors="Liu, Bo; Wang, Rui; Wu, Lemeng; Feng, Yihao; Stone, Peter; Liu, Qiang",
    year=2024,
    limits="What no longer fits the state is forgotten: exact copies of long passages are not to be expected.",
)
_BST = CardText(
    name="Block-State Transformer",
    idea="Attention within blocks and their window; in some layers a state-space model runs over the whole sequence "
    "and hands each block context states of the past to attend to.",
    arxiv="2306.09539",
    title="Block-State Transformers",
    authors="Fathi, Mahan; Pilault, Jonathan; Firat, Orhan; Pal, Christopher; Bacon, Pierre-Luc; Goroshin, Ross",
    year=2023,
    limits="Beyond the window a token sees the past only through the context states.",
)
_SPADE = CardText(
    name="SPADE",
    idea="A state-space model in the bottom layer carries what is far, window or chunk attention in all layers what "
    "is near.",
    arxiv="2212.08136",
    title="Efficient Long Sequence Modeling via State Space Augmented Transformer",
    authors="Zuo, Simiao; Liu, Xiaodong; Jiao, Jian; Charles, Denis; Manavoglu, Eren; Zhao, Tuo; Gao, Jianfeng",
    year=2022,
    limits="Beyond the window a token sees the past only through the bottom layer's state.",
)
_LMU_ISA = CardText(
    name="LMU-ISA",
    idea="A fixed Legendre Memory Unit keeps a sliding window of each channel in a few coefficients, and attention "
    "works among the coefficients of one time step instead of among time steps.",
    arxiv="2110.02402",
    title="Language Modeling using LMUs: 10x Better Data Efficiency or Improved Scaling Compared to Transformers",
    authors="Chilkuri, Narsimha; Hunsberger, Eric; Voelker, Aaron; Malik, Gurshaant; Eliasmith, Chris",
    year=2021,
    limits="The memory is a smoothed window of `lmu_theta` tokens: what is older fades, and sharp detail is lost.",
)
CARD_TEXTS = {"longhorn": _LONGHORN, "bst": _BST, "spade": _SPADE, "spade_seq2seq": _SPADE, "lmu_isa": _LMU_ISA}

"""The table of subcommands; it imports nothing heavy, so that help and a misspelt word cost no time.

A command is a module with `run(config, flags) -> int`, the exit code of one job. It may also have `report(flags)`,
called once after all jobs with what `run` appended to `flags.results`, and `Settings`, its own subclass of Config.
"""

import importlib.util
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A word that begins with `--`; `value` names its value if it takes one, `default` is that if it is left out."""

    name: str
    help: str
    value: str = ""
    default: str = ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand; `actions` are its second words, each with the names of the words that follow it.

    words: the names of the words that a command without actions takes. rows: each job leaves a row of the ledger.
    """

    name: str
    summary: str
    module: str
    usage: str
    text: str
    example: str
    flags: tuple[Flag, ...] = ()
    actions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    rows: bool = False

    @property
    def exists(self) -> bool:
        """Whether its module is there; a command without one is not shown and cannot be run."""
        return importlib.util.find_spec(self.module) is not None


JSON = Flag(name="json", help="one JSON document on stdout; errors too")
CONFIG = Flag(name="config", help="print the settings of the run instead of running")
HELP = Flag(name="help", help="this text")
EVERYWHERE = (JSON, CONFIG, HELP)

REQUIRE = Flag(
    name="require",
    value="bar|strict|exact|N",
    default="bar",
    help="exit 1 unless met: the golden's own bar (default), a STRICT\n"
    "bar, run 0 in every token, or N tokens in agreement",
)

COMMANDS: tuple[Command, ...] = (
    Command(
        name="gate",
        summary="run variants against golden tokens: agreement, divergence, speed",
        module="experiments.gate",
        rows=True,
        usage="neartie gate [-m] [variant=V] [golden=G] [model=DIR] [engine=E] ...",
        text=(
            "variant=V  a named variant (`neartie variants`); variant.gemm=f32 changes it\n"
            "golden=G   gate, wide, or a path\n"
            "model=DIR  a checkpoint folder; left out, the shipped one\n"
            "engine=E   local, transformers, openai (engine.url=URL), vllm, replay\n"
            "           (engine.folder=DIR or FILE of tokens)\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each\n"
            "A row below the bar is a result and exits 0, unless --require asks for more."
        ),
        example="neartie gate -m variant=f32,bf16_stream golden=gate --require=100",
        flags=(REQUIRE,),
    ),
    Command(
        name="verdict",
        summary="rounding or defect, and where: every instrument the engine allows",
        module="experiments.verdict",
        rows=True,
        usage="neartie verdict [variant=V] [golden=G] [engine=transformers] ...",
        text=(
            "Local replay and precision ladder name the site and layer of a defect; the\n"
            "envelope of noisy members and routing explain each divergence; the expected\n"
            "score says what a correct run of the recipe reaches.\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each\n"
            "members=8  seed=0  noisy members, of the envelope and of the expected score\n"
            "reference=bf16_engine  the variant that stands for the golden's engine\n"
            "declared=V  the variant that another engine is taken to compute as\n"
            "noise=NATS  of an engine judged by tokens alone, without logprobs\n"
            "A defect is a result and exits 0, unless --fail is given."
        ),
        example="neartie verdict engine=transformers engine.dtype=bf16",
        flags=(Flag(name="fail", help="exit 1 where the verdict is DEFECT, SUSPECT or INVALID"),),
    ),
    Command(
        name="campaign",
        summary="all variants of the published campaign, one load, and its table",
        module="experiments.campaign",
        usage="neartie campaign [device=cuda] [variants=[A,B]] [results=DIR] ...",
        text=(
            "Each variant: the gate three times (repeats must be bit-identical), and the\n"
            "wide golden once, freely and teacher-forced, unless it recomputes. Then the\n"
            "table: published beside the ledger's CPU and GPU rows, the shipped ones too.\n"
            "variants=[A,B]  only these; left out, all that this machine can run\n"
            "repeats=3  wide=wide  wide_batch=16  wide='' leaves the second battery out\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each\n"
            "The same: neartie experiment=campaign."
        ),
        example="neartie campaign device=cuda results=runs/h200",
    ),
    Command(
        name="regress",
        summary="an arm against its baseline at the merge base, for CI",
        module="experiments.regress",
        rows=True,
        usage="neartie regress [-m] [variant=V] [golden=G] [baseline=DIR] [base=B] ...",
        text=(
            "Agreement, first divergences, verdict, arithmetic, tok/s both ways, memory; any\n"
            "finding exits 1. The baseline is read as it was where this branch left base=main\n"
            "(none: as it lies); an edit of it is a finding. Speed: repeats=3 runs, band\n"
            "speed=0.2; memory=0.1. junit=FILE  summary=FILE (also GITHUB_STEP_SUMMARY)"
        ),
        example="neartie regress variant=f32 base=origin/main --ab junit=gate.xml",
        flags=(
            Flag(name="record", help="make what runs now the baseline"),
            Flag(name="ab", help="old and new code in turn here, instead of the stored figures"),
            Flag(name="accept", help="an edit of the baseline is meant"),
        ),
    ),
    Command(
        name="ladder-to-vllm",
        summary="from f32 to the engine, one rounding point at a time",
        module="experiments.ladder_to_vllm",
        usage="neartie ladder-to-vllm [target=bf16_engine] [start=f32] [golden=G] ...",
        text=(
            "Each group of the target's rounding points, with those before it and alone:\n"
            "median logprob distance to the golden's engine, tokens that agree forced and\n"
            "free, and what a correct run of that recipe is expected to score. A score\n"
            "inside its interval is noise, not progress.\n"
            "members=8  noisy runs of each expected score; members=0 leaves it out\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each\n"
            "The same: neartie experiment=ladder_to_vllm."
        ),
        example="neartie ladder-to-vllm target=bf16_engine members=4",
    ),
    Command(
        name="bisect",
        summary="which places, or which axes, make two variants differ",
        module="experiments.bisect",
        rows=True,
        usage="neartie bisect a=A b=B [token=[P,T]] [shares=true] [golden=G] ...",
        text=(
            "Where A and B first differ at all, beyond rounding, and in function; then the\n"
            "smallest set of (site, layer) that turns A's token into B's when it computes as\n"
            "in B, forced along the golden. variant=A against=B is the same.\n"
            "token=[P,T]  prompt P, position T; left out: the first that differs\n"
            "alone=true  also try every place by itself; up to 64 are tried in any case\n"
            "capture=DIR  keep the first place's operation for `neartie replay`\n"
            "shares=true  what each axis adds to B's score over A's: orders=24 sampled\n"
            "             score=forced|free, batch=N rows together in every run"
        ),
        example="neartie bisect a=f64_islands b=device_kda token=[4,6]",
    ),
    Command(
        name="replay",
        summary="run one captured operation again, alone: its bits and its error",
        module="experiments.replay",
        usage="neartie replay FILE",
        text=(
            "FILE is one that `neartie bisect capture=DIR` wrote; it holds all that is read.\n"
            "Runs it under its own rule, bit for bit, and in float64: error, its bound, ulps,\n"
            "the worst element and what the error looks like. A fault exits 0 without --fail."
        ),
        example="neartie replay results/ops/k_proj@0-a.safetensors",
        flags=(Flag(name="fail", help="exit 1 where bits differ or the error is out of bounds"),),
        words=("FILE",),
    ),
    Command(
        name="capture",
        summary="K greedy runs of an engine become a golden, or replace one",
        module="experiments.capture",
        usage="neartie capture golden=NAME [engine=E] [prompts=FILE] [runs=K] ...",
        text=(
            "The bar is decided by the K runs; repeats, rows together and a cold prefix cache\n"
            "are held against run 0. What is not plain greedy is refused. Goes on where a\n"
            "capture stopped. golden=runs/mine writes runs/mine.json and runs/mine.npz.\n"
            "prompts=gate  a golden's, FILE.txt (a text a line) or FILE.jsonl\n"
            "max_tokens=16 runs=3 logprobs=20 eos=ignored|stop bos=true"
        ),
        example="neartie capture engine=transformers prompts=gate golden=runs/hf",
        flags=(
            Flag(name="why", value="REASON", help="replace an existing golden; the old one is kept beside it"),
            Flag(name="who", value="NAME", help="who replaces it"),
            Flag(name="compared", value="WORDS", help="what old and new code gave here, if the environment moved"),
        ),
    ),
    Command(
        name="cross",
        summary="engines against each other: agreement, verdict, largest margin",
        module="experiments.cross",
        usage="neartie cross engines=[E,E,...] [goldens=[G,...]] [limit=N] ...",
        text=(
            "Each engine runs each golden's prompts once and is then reference to all the\n"
            "others, beside the golden itself: a table a golden, references down, candidates\n"
            "across. An engine is a variant's name, an engine's, or words in quotes. What is\n"
            "finished stays, so a stopped run goes on where it was."
        ),
        example="neartie cross \"engines=[f32,'transformers engine.dtype=bf16']\"",
    ),
    Command(
        name="explain",
        summary="what a variant computes at each site; how two variants differ",
        module="experiments.explain",
        usage="neartie explain variant=A [against=B] [model=DIR]",
        text="One row a site: formats of operands, sum and result, algorithm, implementation.\n"
        "With against=B only the rows in which A and B differ.",
        example="neartie explain variant=bf16_stream against=incremental_chunk",
    ),
    Command(
        name="near-ties",
        summary="places of a golden where the next token hangs on little; a figure",
        module="experiments.near_ties",
        usage="neartie near-ties [golden=G] [model=DIR] [variant=V] [top=N] ...",
        text=(
            "Gap: first token over second, in nats, by a float64 oracle of the model.\n"
            "Lists the top=20 smallest, writes histogram and grid to results/reports.\n"
            "variant=V is read by --noise=measured alone."
        ),
        example="neartie near-ties golden=wide variant=bf16_stream --noise=measured",
        flags=(
            Flag(name="noise", value="NATS|measured", help="hold the gaps against this noise, or V's own on G"),
            Flag(name="recorded", help="no model: the gaps that the golden recorded"),
            Flag(name="csv", value="FILE", help="every place, smallest gap first"),
        ),
    ),
    Command(
        name="jitter",
        summary="a variant's distance to itself with its products moved by 1e-7",
        module="experiments.jitter",
        usage="neartie jitter variant=V [golden=G] [rounding_points=true] ...",
        text=(
            "The least distance that any implementation of the same roundings can have,\n"
            "beside V's distance to the golden (where it has logprobs) and to the oracle.\n"
            "relative=1e-7  how far products are moved, of their rms\n"
            "rounding_points=true  take each of V's rounding points out alone, and say\n"
            "  whether that stands out of the floor; jitters=6 of each layer (minutes)"
        ),
        example="neartie jitter variant=transformers_mirror rounding_points=true",
    ),
    Command(
        name="plan",
        summary="how many prompts and tokens it takes to tell two variants apart",
        module="experiments.plan",
        usage="neartie plan variant=A against=B [power=0.8] [golden=G] ...",
        text=(
            "Runs A and B once on G beside the float64 oracle; from their noise and the\n"
            "oracle's gaps: hazard per token, score and spread, battery sizes needed.\n"
            "power=0.8 alpha=0.05  of a two-sided test, paired over prompts\n"
            "difference=SHARE  of tokens to be found, instead of the expected one\n"
            "rematch=R  share of tokens that agree after a divergence (0)"
        ),
        example="neartie plan variant=bf16_stream against=f32 golden=wide",
    ),
    Command(
        name="convert",
        summary="a checkpoint in the form that another engine reads",
        module="experiments.convert",
        usage="neartie convert [model=DIR] to=gguf|hf|transformers out=PATH ...",
        text=(
            "gguf: one file for llama.cpp. hf: a folder in the release's names (vLLM, MLX,\n"
            "transformers). transformers: a folder in that library's in-memory names.\n"
            "Reads any of the folders, also what save_pretrained named wrongly; adds no BOS.\n"
            "weights=f32|bf16|f16  of the matrices; left out: as stored, f32 for gguf\n"
            "vocabulary=ids|text  gguf: tokens as [17], which no server merges, or as text\n"
            "eos=reachable|unreachable  left out: unreachable for a gguf of ids alone"
        ),
        example="neartie convert to=gguf out=/tmp/kimi.gguf",
    ),
    Command(
        name="bench",
        summary="decode against the library or a variant, timed step by step",
        module="experiments.bench",
        usage="neartie bench variant=A [against=transformers] [steps=96] [runs=3] ...",
        text=(
            "Both sides decode the same tokens in one process, in turns, so that what slows\n"
            "the machine slows both: ratio of each pair, by wall clock and processor time.\n"
            "against=B  transformers (float32), transformers_bf16, or a named variant\n"
            "steps=96   timed tokens of a run, after 8 that are in no figure\n"
            "runs=3     each on another prompt of golden=G\n"
            "device.threads=1  is what small models want"
        ),
        rows=True,
        example="neartie bench variant=f32_fast against=transformers device.threads=1",
    ),
    Command(
        name="golden",
        summary="show, import, export or verify golden tokens",
        module="experiments.golden",
        usage="neartie golden ACTION ...",
        text=(
            "show G             sizes, bar, ties, sampling, provenance\n"
            "verify G           every contradiction in it; exit 3 if there is one\n"
            "import FROM OUT    greedy_ids.npy, p0_prompt.i32, ... to OUT.json, OUT.npz; or a\n"
            "                   file of one run with its prompt_ids, a folder of K such files\n"
            "export G FOLDER    the other way round\n"
            "G is gate, wide, or a path. Without an action: the shipped goldens."
        ),
        example="neartie golden import captures/run7 goldens/run7",
        actions={"list": (), "show": ("G",), "verify": ("G",), "import": ("FROM", "OUT"), "export": ("G", "FOLDER")},
        flags=(
            Flag(name="eos", help="import: what follows this id in a row is padding", value="ID"),
            Flag(name="greedy", help="import of files: each token is the argmax, as you know"),
        ),
    ),
    Command(
        name="ledger",
        summary="list, show, compare or export the runs on record",
        module="experiments.ledger",
        usage="neartie ledger [ACTION ...] [results=DIR]",
        text=(
            "list         one line a run, oldest first; also without an action\n"
            "show RUN     the whole record; RUN is a run id or the start of one\n"
            "diff RUN RUN what differs; refused where the two cannot be compared\n"
            "query SQL    a SELECT over the table `runs` (DuckDB; columns: describe runs)\n"
            "frontier     agreement against tok/s, newest run of each variant\n"
            "history variant=V  its runs in order of time, with the change in agreement\n"
            "export FILE  every row, flat, to FILE.csv or FILE.parquet\n"
            "compact      all rows in one Parquet file too, checked; the raw files stay\n"
            "migrate      rows of older schemas written again, shorter; they read the same"
        ),
        example="neartie ledger list --published",
        flags=(Flag(name="published", help="the campaign's published rows too"),),
        actions={
            "list": (),
            "show": ("RUN",),
            "diff": ("RUN", "RUN"),
            "export": ("FILE",),
            "migrate": (),
            "compact": (),
            "query": ("SQL",),
            "frontier": (),
            "history": (),
        },
    ),
    Command(
        name="variants",
        summary="the named variants, a line each",
        module="experiments.named",
        usage="neartie variants",
        text="`neartie explain variant=V` shows one in full; conf/variant/ holds the files.",
        example="neartie variants",
    ),
    Command(
        name="calibrate",
        summary="re-make the stored calibration: how far correct variants stand",
        module="experiments.calibrate",
        usage="neartie calibrate [golden=G] [limit=N] [max_tokens=N] [members=K] ...",
        text=(
            "Runs benign variants, composed for this alone, each against the envelope of\n"
            "its own recipe, and stores their shifts with a hash (out=FILE). Verdicts add\n"
            "this spread to that of the envelope's members."
        ),
        example="neartie calibrate out=/tmp/again.json seed=1",
    ),
    Command(
        name="power",
        summary="planted defects and correct variants: which rule catches what",
        module="experiments.power",
        usage="neartie power [seeds=7] [workers=2] [out=DIR] [--quick]",
        text=(
            "Detection, false alarms and localisation of our instruments and of the rules\n"
            "in use elsewhere, on the same runs. An hour on two cores; cells that are\n"
            "finished stay in out=results/power, so a stopped run goes on where it was."
        ),
        example="neartie power --quick",
        flags=(Flag(name="quick", help="a few cells, under a minute"),),
    ),
    Command(
        name="train",
        summary="a small checkpoint from scratch, with the transformers library",
        module="experiments.train",
        usage="neartie train text=PATH out=DIR [model=DIR] [steps=N] ...",
        text=(
            "Geometry and tokenizer are those of model=; text=PATH is a file or a folder.\n"
            "AdamW, bf16 autocast over float32 weights, as the shipped model was made:\n"
            "steps=2454 batch=64 length=512 rate=3e-3 warmup=100 seed=0, device=cuda; on a\n"
            "CPU a step of this size takes minutes: try steps=2 batch=2 length=64.\n"
            "Saves the release's names: matrices in bf16, decay and router bias in float32."
        ),
        example="neartie train text=corpus/ out=/tmp/small device=cuda",
    ),
    Command(
        name="doctor",
        summary="what is installed, are the assets whole; or what an engine offers",
        module="experiments.doctor",
        usage="neartie doctor [engine=E ...] [golden=G]",
        text=(
            "Exit code 4 when something that every run needs is missing. With engine=E: what\n"
            "it takes and gives, which instruments that allows, and its limits; a server is\n"
            "asked for a token after G's first prompt. Exit code 5 where it returns no ids."
        ),
        example="neartie doctor engine=openai engine.url=http://127.0.0.1:8000",
    ),
)


def available() -> dict[str, Command]:
    """The commands whose module is there, by name."""
    return {c.name: c for c in COMMANDS if c.exists}

"""The subcommands that run a model: each job of one takes seconds to hours."""

from experiments.command import Command, Flag

REQUIRE = Flag(
    name="require",
    value="bar|strict|exact|N",
    default="bar",
    help="exit 1 unless met: the golden's own bar (default), a STRICT\n"
    "bar, run 0 in every token, or N tokens in agreement",
)

RUN: tuple[Command, ...] = (
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
            "variants=[A,B]  only these, A+impl.norms=torch too; left out, all that can run\n"
            "repeats=3  wide=wide  wide_batch=16  wide='' leaves the second battery out\n"
            "gate_batch=8  prompts of the gate that run together\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each; of the\n"
            "two goldens, one that has fewer runs whole\n"
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
        usage="neartie ladder-to-vllm [target=vllm_mirror] [start=f32] [golden=G] ...",
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
        name="bench",
        summary="decode against the library or a variant, timed step by step",
        module="experiments.bench",
        usage="neartie bench variant=A [against=transformers] [steps=96] [runs=3] ...",
        text=(
            "Both sides decode the same tokens in one process, in turns, so that what slows\n"
            "the machine slows both: ratio of each pair, by wall clock and processor time.\n"
            "against=B  transformers (float32), transformers_bf16, a named variant, or\n"
            "  llama_server: llama.cpp's own, float32, whole answers by its own clock\n"
            "against=floors  device=cuda: a fused step's launches, decode and prefill beside\n"
            "  what the device's memory allows; contexts=[32,8192] prefills=[64,512,2048]\n"
            "  variant=paged_engine batches=[1,8,64], engine=transformers, engine=vllm: rates\n"
            "  oracle_tokens=16  the fused step's logits against float64\n"
            "steps=96   timed tokens of a run, after 8 that are in no figure\n"
            "runs=3     each on another prompt of golden=G; set device.threads=1"
        ),
        rows=True,
        example="neartie bench variant=f32_fast against=transformers device.threads=1",
    ),
    Command(
        name="serve",
        summary="a paged variant behind the OpenAI API, until it is stopped",
        module="experiments.serve",
        rows=True,
        usage="neartie serve variant=paged_batch [port=8000] [host=127.0.0.1] ...",
        text=(
            "/v1/completions, /v1/chat/completions, /v1/models, /health, /metrics; text or\n"
            "token ids in and out, on the library's own paged runner and arithmetic.\n"
            "max_len=N  tokens of prompt and answer; memory is planned by it and printed\n"
            "queue=256  answers that wait or run at a time, more get 429; body_bytes=1048576\n"
            "key=NEARTIE_API_KEY  the variable of the environment that holds an API key\n"
            "grace_s=10  for answers to finish when stopped; then a row says what was served"
        ),
        example="neartie serve variant=paged_batch max_len=1024 device.threads=1",
    ),
    Command(
        name="identity",
        summary="library, paged runner and server: the same tokens, the same bits?",
        module="experiments.identity",
        usage="neartie identity variant=paged_batch [goldens=[gate,wide]] ...",
        text=(
            "Each golden's prompts through the library on carried state, its paged runner,\n"
            "a server asked one at a time, and one under load, at one arithmetic: first\n"
            "batch-invariant (a difference exits 1), then not, with the verdict on it.\n"
            "at_once=64  requests under load; others=8  clients beside them that come and go\n"
            "limit=N  max_tokens=N  only the first prompts, the first tokens of each\n"
            "The same: neartie experiment=identity."
        ),
        rows=True,
        example="neartie identity variant=paged_batch goldens=[gate] device.threads=1",
    ),
    Command(
        name="calibrate",
        summary="re-make the stored calibration: how far correct variants stand",
        module="experiments.calibrate",
        usage="neartie calibrate [golden=G] [limit=N] [members=K] [workers=N]",
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
        usage="neartie power [seeds=7] [workers=2] [out=DIR] [--quick|--outside]",
        text=(
            "Detection, false alarms and localisation of our instruments and of the rules\n"
            "in use elsewhere, on the same runs. An hour on two cores; cells that are\n"
            "finished stay in out=results/power, so a stopped run goes on where it was."
        ),
        example="neartie power --quick",
        flags=(
            Flag(name="quick", help="a few cells, under a minute"),
            Flag(name="outside", help="the verdict on engines that show outputs alone"),
        ),
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
)

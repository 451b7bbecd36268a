"""The subcommands that read, show and convert: goldens, rows, recipes, checkpoints."""

from experiments.command import Command, Flag

READ: tuple[Command, ...] = (
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
        name="report",
        summary="the runs of one golden as one HTML page; figures for papers",
        module="experiments.report",
        usage="neartie report [golden=G] [out=FILE] [figures=DIR] [variants=[A,B]] ...",
        text=(
            "Verdicts, every token by agreement, margin and cause, excess by layer, expected\n"
            "scores, agreement against tok/s, recipe differences, provenance, of the newest\n"
            "run of each arm on record. Needs no network; keyboard, telephone and print.\n"
            "out=FILE       left out: results/reports/report-GOLDEN.html\n"
            "variants=[A,B] only these\n"
            "against=V      hold the recipes against V's\n"
            "cells=20000    how many tokens are drawn at most\n"
            "figures=DIR    every figure as SVG and PNG too"
        ),
        example="neartie report golden=gate figures=paper/",
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
        name="status",
        summary="what runs now, what ended last, what crashed, what space is left",
        module="experiments.status",
        usage="neartie status [results=DIR]",
        text=(
            "Runs in flight are told by their markers, of processes on this machine that are\n"
            "still there. A marker without its process is a run that crashed: it has no row,\n"
            "and `neartie gate -m ... resume=true` runs it again."
        ),
        example="neartie status results=runs/h200",
    ),
    Command(
        name="completion",
        summary="a script that completes commands, settings and names in a shell",
        module="experiments.completion",
        usage="neartie completion bash|zsh|fish",
        text=(
            "Commands, their actions and flags, and the names after variant=, golden=,\n"
            "engine=, model= and device=, as they are now.\n"
            'bash  eval "$(neartie completion bash)" in ~/.bashrc\n'
            "zsh   the same in ~/.zshrc, after compinit\n"
            "fish  neartie completion fish > ~/.config/fish/completions/neartie.fish"
        ),
        example="neartie completion fish > ~/.config/fish/completions/neartie.fish",
        actions={"bash": (), "zsh": (), "fish": ()},
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

//! `smddp-bench completion SHELL`, `smddp-bench man`: shell completion scripts and manual pages, generated from the parsers.

use std::io::Write;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, CommandFactory, Parser, ValueEnum, ValueHint};
use clap_complete::{generate, shells};
use clap_mangen::Man;

use crate::error::{Error, Result};
use crate::task::Task;
use crate::types::{DTYPES, REDOPS};
use crate::{cli, compare, explain, replay, simulate, tune};

const PROGRAM: &str = "smddp-bench";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Prints a shell completion script
#[derive(Debug, Parser)]
#[command(
    name = "smddp-bench completion",
    after_help = "\
bash: smddp-bench completion bash > ~/.local/share/bash-completion/completions/smddp-bench
zsh:  smddp-bench completion zsh > ~/.zfunc/_smddp-bench, with fpath+=~/.zfunc before compinit
fish: smddp-bench completion fish > ~/.config/fish/completions/smddp-bench.fish"
)]
pub(crate) struct Completion {
    pub shell: Shell,
}

/// Prints the manual page of the program or of a subcommand
#[derive(Debug, Parser)]
#[command(name = "smddp-bench man", after_help = "To read it: smddp-bench man | man -l -")]
pub(crate) struct Manual {
    /// Subcommand, such as simulate
    pub subcommand: Option<String>,
    /// Write all pages to this folder instead
    #[arg(long, value_name = "FOLDER", conflicts_with = "subcommand", value_hint = ValueHint::DirPath)]
    pub to: Option<PathBuf>,
}

pub(crate) fn complete(cli: &Completion) -> Result<i32> {
    let mut script = Vec::new();
    // The bash script completes options after any first word. The other scripts complete only options of subcommands.
    match cli.shell {
        Shell::Bash => generate(shells::Bash, &mut program(), PROGRAM, &mut script),
        Shell::Zsh => generate(shells::Zsh, &mut by_first_word(), PROGRAM, &mut script),
        Shell::Fish => generate(shells::Fish, &mut by_first_word(), PROGRAM, &mut script),
    }
    // The bash generator (clap_complete 4.6) takes the hyphen of a program name as the start of a subcommand in one of two
    // places.
    let script = String::from_utf8_lossy(&script).replace("smddp__subcmd__bench", "smddp__bench");
    print(script.as_bytes())
}

pub(crate) fn manual(cli: &Manual) -> Result<i32> {
    if let Some(folder) = &cli.to {
        for (page, command) in pages() {
            let path = folder.join(format!("{page}.1"));
            std::fs::write(&path, text(command)?)
                .map_err(Error::io(format!("writing {}", path.display())))?;
        }
        return Ok(0);
    }
    let wanted = cli.subcommand.as_ref().map_or(PROGRAM.into(), |name| format!("{PROGRAM}-{name}"));
    let found = pages().into_iter().find(|(page, _)| *page == wanted);
    let (_, command) = found.ok_or_else(|| {
        let names = each().map(|(name, ..)| name).join(", ");
        Error::Usage(format!("manual page {wanted} does not exist: expected one of {names}, or no argument"))
    })?;
    print(&text(command)?)
}

fn text(command: Command) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    Man::new(command).render(&mut text).map_err(Error::io("writing a page"))?;
    Ok(text)
}

/// Returns the manual pages by name.
fn pages() -> Vec<(&'static str, Command)> {
    let of = |(name, page, command): (&str, &'static str, Command)| {
        (page, command.name(page).display_name(page).bin_name(format!("{PROGRAM} {name}")))
    };
    std::iter::once((PROGRAM, program())).chain(each().into_iter().map(of)).collect()
}

/// Returns the whole command line: the measurements and the subcommands.
fn program() -> Command {
    let torch = Arg::new("torch").long("torch").value_name("BACKEND,BACKEND");
    let whole = cli::Cli::command();
    // Hidden options are for scripts of nccl-tests and for started ranks.
    let shown = whole.get_arguments().filter(|arg| !arg.is_hide_set()).cloned();
    Command::new(PROGRAM)
        .version(env!("CARGO_PKG_VERSION"))
        .about(whole.get_about().cloned().unwrap_or_default())
        .after_help(whole.get_after_help().cloned().unwrap_or_default())
        .args(shown)
        .mut_arg("task", |task| task.value_parser(PossibleValuesParser::new(Task::names())))
        .mut_arg("dtype", |dtype| dtype.value_parser(names(&DTYPES)))
        .mut_arg("redop", |redop| redop.value_parser(names(&REDOPS)))
        // Options of Python's console command, which it removes before this parser runs.
        .arg(
            torch.help(
                "Measure backends of torch.distributed alternately (smddp-bench of the Python package)",
            ),
        )
        .arg(plot())
        .subcommands(subcommands())
        .disable_help_subcommand(true)
}

/// Returns the command line with a subcommand for each measurement, which has all options.
fn by_first_word() -> Command {
    let whole = program();
    let options: Vec<Arg> = whole.get_arguments().filter(|arg| !arg.is_positional()).cloned().collect();
    let measured = Task::names().into_iter().map(|name| Command::new(name).args(options.clone()));
    Command::new(PROGRAM).version(env!("CARGO_PKG_VERSION")).subcommands(measured).subcommands(subcommands())
}

fn subcommands() -> impl Iterator<Item = Command> {
    each().into_iter().map(|(name, _, command)| command.name(name))
}

/// Returns each subcommand with its name and the name of its page.
fn each() -> [(&'static str, &'static str, Command); 7] {
    [
        ("simulate", "smddp-bench-simulate", simulate::Cli::command()),
        ("explain", "smddp-bench-explain", explain::Cli::command()),
        ("tune", "smddp-bench-tune", tune::Cli::command()),
        ("compare", "smddp-bench-compare", compare::Cli::command().arg(plot())),
        ("replay", "smddp-bench-replay", replay::Cli::command()),
        ("completion", "smddp-bench-completion", Completion::command()),
        ("man", "smddp-bench-man", Manual::command()),
    ]
    .map(|(name, page, command)| (name, page, command.version(env!("CARGO_PKG_VERSION"))))
}

fn names<T>(of: &[(&'static str, T)]) -> PossibleValuesParser {
    PossibleValuesParser::new(of.iter().map(|(name, _)| *name).chain(["all"]))
}

fn plot() -> Arg {
    let plot = Arg::new("plot").long("plot").value_name("FILE").value_hint(ValueHint::FilePath);
    plot.help("Draw the figures: FILE.png, .svg, .pdf (smddp-bench of the Python package)")
}

fn print(text: &[u8]) -> Result<i32> {
    let mut out = std::io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map(|()| 0).map_err(Error::io("writing to stdout"))
}

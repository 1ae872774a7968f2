//! The page `docs/src/counters.md` holds the table of the code, and every proof that the table names exists.
//!
//! `UROCE_BLESS=1` writes the page's table anew.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use uroce::counters::{ABSENT, Counters};

const BEGIN: &str = "<!-- table of stack/src/counters/table.rs: begin -->\n";
const END: &str = "<!-- end -->\n";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").to_owned()
}

fn table() -> String {
    let code = |name: Option<&str>| name.map_or("–".to_owned(), |n| format!("`{n}`"));
    let (counters, bytes) = (Counters::TABLE.len(), size_of::<Counters>());
    let mut out = format!("{counters} counters, {bytes} bytes a QP.\n\n");
    out.push_str("| counter | rxe | mlx5 | of | ticks when | proof |\n|---|---|---|---|---|---|\n");
    for row in Counters::TABLE {
        let (rxe, mlx5) = (code(row.rxe), code(row.mlx5));
        let _ = writeln!(
            out,
            "| `{}` | {rxe} | {mlx5} | {} | {} | `{}` |",
            row.name,
            row.scope.name(),
            row.trigger,
            row.test
        );
    }
    out.push_str("\nNames of mlx5 that are not there, because nothing here does what they count:\n\n");
    out.push_str("| name | why |\n|---|---|\n");
    for absent in ABSENT {
        let _ = writeln!(out, "| `{}` | {} |", absent.name, absent.why);
    }
    out
}

#[test]
fn the_page_holds_the_table() {
    let path = root().join("docs/src/counters.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (before, rest) = page.split_once(BEGIN).expect("where the table begins");
    let (found, after) = rest.split_once(END).expect("where the table ends");
    let wanted = table();
    if std::env::var_os("UROCE_BLESS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{wanted}{END}{after}")).expect("the page is written");
        return;
    }
    assert_eq!(found, wanted, "the code has another table: UROCE_BLESS=1 writes it into the page");
}

#[test]
fn every_proof_exists() {
    for row in Counters::TABLE {
        let (module, function) = row.test.rsplit_once("::").expect("module and function");
        let path = root().join("tests/it").join(format!("{}.rs", module.replace("::", "/")));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let proof = text.find(&format!("#[test]\nfn {function}() {{"));
        let body = proof.and_then(|at| text.get(at..)?.split("\n}\n").next());
        let body = body.unwrap_or_else(|| panic!("{}: no test `{function}` in {module}", row.name));
        assert!(body.contains(&format!("\"{}\"", row.name)), "`{function}` does not look at `{}`", row.name);
    }
}

//! The book and the pages around it: every link leads somewhere, every page is in the table of contents.
//!
//! Owns how links and headings are read from Markdown. Reads only what it is given.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::Finding;

/// Where the pages of the book lie.
const BOOK: &str = "docs/src/";
/// Its table of contents.
const SUMMARY: &str = "docs/src/SUMMARY.md";

/// The Markdown files by path.
pub(super) type Pages = BTreeMap<String, String>;

/// Links to files that are not there, or to headings that the file does not have. `exists` knows all other files.
pub(super) fn broken_links(pages: &Pages, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut out = Vec::new();
    for (path, text) in pages {
        for (line, target) in links(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let file = if file.is_empty() { path.clone() } else { beside(path, file) };
            let finding = |fix| Finding { path: path.clone(), line, rule: "link", fix };
            match (pages.get(&file), anchor) {
                (None, _) if !exists(&file) => out.push(finding(format!("there is no {file}: say where it has gone"))),
                (Some(text), Some(anchor)) if !anchors(text).iter().any(|a| a == anchor) => {
                    out.push(finding(format!("{file} has no heading for #{anchor}")));
                }
                _ => {}
            }
        }
    }
    out
}

/// Pages of the book that the table of contents does not name.
pub(super) fn unlisted(pages: &Pages) -> Vec<Finding> {
    let summary = pages.get(SUMMARY).map(|text| links(text)).unwrap_or_default();
    let listed: Vec<String> = summary.into_iter().map(|(_, target)| beside(SUMMARY, target)).collect();
    let of_the_book = pages.keys().filter(|path| path.starts_with(BOOK) && *path != SUMMARY);
    let missing = of_the_book.filter(|path| !listed.contains(path));
    missing
        .map(|path| Finding {
            path: path.clone(),
            line: 1,
            rule: "book",
            fix: "no reader finds this page: add it to docs/src/SUMMARY.md".to_owned(),
        })
        .collect()
}

/// `target` as seen from the folder of `path`.
fn beside(path: &str, target: &str) -> String {
    let mut out = PathBuf::new();
    for part in Path::new(path).parent().unwrap_or(Path::new("")).join(target).components() {
        if part == Component::ParentDir {
            out.pop();
        } else {
            out.push(part);
        }
    }
    out.to_string_lossy().into_owned()
}

/// Lines outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((number + 1, line))
    })
}

/// What stands in `](…)`, with its line.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut out = Vec::new();
    for (number, line) in prose(text) {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        out.extend(targets.map(|(target, _)| (number, target)));
    }
    out
}

/// The anchors that mdBook and GitHub give to headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    let anchor = |heading: &str| {
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        heading.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(files: &[(&str, &str)]) -> Pages {
        files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_link_leads_to_a_file_and_a_heading() {
        let pages = pages(&[
            ("README.md", "[a](docs/src/a.md) [web](https://x.org/y) [no](docs/b.md)\n```\n[code](nowhere.md)\n```\n"),
            ("docs/src/a.md", "# A\n## Why `x` waits: -d\n[1](#why-x-waits--d) [2](../../README.md#a) [3](../adr)\n"),
        ]);
        let broken = broken_links(&pages, |path| path == "docs/adr");
        let broken: Vec<_> = broken.iter().map(|f| (f.path.as_str(), f.line, f.fix.as_str())).collect();
        assert_eq!(
            broken,
            [
                ("README.md", 1, "there is no docs/b.md: say where it has gone"),
                ("docs/src/a.md", 3, "README.md has no heading for #a"),
            ]
        );
    }

    #[test]
    fn a_page_belongs_into_the_table_of_contents() {
        let pages = pages(&[(SUMMARY, "- [A](a.md)\n"), ("docs/src/a.md", ""), ("docs/src/b.md", ""), ("x.md", "")]);
        let found: Vec<_> = unlisted(&pages).into_iter().map(|f| f.path).collect();
        assert_eq!(found, ["docs/src/b.md"]);
    }
}

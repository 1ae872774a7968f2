//! Rows of `key value` pairs, as iproute2's `rdma` prints them: text, JSON, and filters over any key.
//!
//! Owns the grammar `[qp] show [link DEV/PORT] [KEY VALUE]…` and the two output shapes. Knows no object.

use clap::Args;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use uroce::inspect::Snapshot;

use crate::exit::Failure;
use crate::report::Output;

/// The one port of a device.
const PORT: u64 = 1;

/// Flags with the letters of `rdma`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RowArgs {
    /// JSON, with the keys of iproute2's rdma: an array of objects on one line
    #[arg(short)]
    pub(crate) j: bool,
    /// JSON on many lines
    #[arg(short, long)]
    pub(crate) pretty: bool,
    /// More: drop reasons, queue fill, PSNs, retries, what a QP waits for, the last error, keys
    #[arg(short, long)]
    pub(crate) details: bool,
}

/// A value of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Number(u64),
    /// Shown in hexadecimal as text.
    Hex(u64),
    Text(String),
    List(Vec<u64>),
}

impl Value {
    fn text(&self) -> String {
        match self {
            Self::Number(n) => n.to_string(),
            Self::Hex(n) => format!("{n:#x}"),
            Self::Text(t) if t.contains(' ') => format!("\"{t}\""),
            Self::Text(t) => t.clone(),
            Self::List(all) => all.iter().map(u64::to_string).collect::<Vec<_>>().join(","),
        }
    }

    /// Whether it is one of `wanted`: values and ranges of numbers with commas between.
    fn is_one_of(&self, wanted: &str) -> bool {
        wanted.split(',').any(|one| match self {
            Self::Number(n) | Self::Hex(n) => covers(one, *n),
            Self::List(all) => all.iter().any(|n| covers(one, *n)),
            Self::Text(text) => {
                text.eq_ignore_ascii_case(one) || text.rsplit_once(':').is_some_and(|(ip, _)| ip == one)
            }
        })
    }
}

fn number(text: &str) -> Option<u64> {
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |hex| u64::from_str_radix(hex, 16).ok())
}

fn covers(range: &str, n: u64) -> bool {
    match range.split_once('-') {
        Some((from, to)) => number(from).is_some_and(|f| f <= n) && number(to).is_some_and(|t| n <= t),
        None => number(range) == Some(n),
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(n) | Self::Hex(n) => s.serialize_u64(*n),
            Self::Text(t) => s.serialize_str(t),
            Self::List(all) => all.serialize(s),
        }
    }
}

/// What a row is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// `link DEV/PORT`.
    Link,
    /// `dev DEV`.
    Device,
}

/// One object.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    index: u64,
    device: String,
    of: Of,
    pairs: Vec<(String, Value)>,
    details: Vec<(String, Value)>,
}

impl Row {
    /// A row of the endpoint that was found as number `index`.
    pub(crate) fn new(index: usize, snapshot: &Snapshot, of: Of) -> Self {
        let device = snapshot.device.name.clone();
        Self { index: index as u64, device, of, pairs: Vec::new(), details: Vec::new() }
    }

    /// Adds a number.
    pub(crate) fn number(self, key: &str, n: impl Into<u64>) -> Self {
        self.pair(key, Value::Number(n.into()))
    }

    /// Adds a text.
    pub(crate) fn text(self, key: &str, text: impl Into<String>) -> Self {
        self.pair(key, Value::Text(text.into()))
    }

    /// Adds a pair.
    pub(crate) fn pair(mut self, key: &str, value: Value) -> Self {
        self.pairs.push((key.to_owned(), value));
        self
    }

    /// Adds a pair if there is a value.
    pub(crate) fn maybe(self, key: &str, value: Option<Value>) -> Self {
        match value {
            Some(value) => self.pair(key, value),
            None => self,
        }
    }

    /// Adds the process.
    pub(crate) fn process(self, snapshot: &Snapshot) -> Self {
        self.number("pid", snapshot.pid).text("comm", snapshot.comm.clone())
    }

    /// Adds a pair that only `-d` shows.
    pub(crate) fn detail(mut self, key: &str, value: Option<Value>) -> Self {
        self.details.extend(value.map(|v| (key.to_owned(), v)));
        self
    }

    /// `0: uroce0: pd 1 cq 2 …`, as `rdma resource` sums up a device.
    pub(crate) fn summary(&self) -> String {
        let pairs: String = self.pairs.iter().map(|(k, v)| format!(" {k} {}", v.text())).collect();
        format!("{}: {}:{pairs}", self.index, self.device)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.pairs.iter().chain(&self.details).find(|(k, _)| k == key).map(|(_, v)| v)
    }

    fn line(&self, details: bool) -> String {
        let head = match self.of {
            Of::Link => format!("link {}/{PORT}", self.device),
            Of::Device => format!("dev {}", self.device),
        };
        let join =
            |pairs: &[(String, Value)]| pairs.iter().map(|(k, v)| format!(" {k} {}", v.text())).collect::<String>();
        let more =
            if details && !self.details.is_empty() { format!("\n   {}", join(&self.details)) } else { String::new() };
        format!("{head}{}{more}", join(&self.pairs))
    }
}

/// A row as JSON: the keys of `rdma -j`.
struct Json<'a>(&'a Row, bool);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let Self(row, details) = self;
        let mut map = s.serialize_map(None)?;
        map.serialize_entry("ifindex", &row.index)?;
        map.serialize_entry("ifname", &row.device)?;
        if row.of == Of::Link {
            map.serialize_entry("port", &PORT)?;
        }
        for (key, value) in row.pairs.iter().chain(row.details.iter().filter(|_| *details)) {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

/// Prints rows in the shape that was asked for.
pub(crate) fn print(rows: &[Row], args: &RowArgs, out: &mut Output) -> Result<(), Failure> {
    let json: Vec<_> = rows.iter().map(|row| Json(row, args.details)).collect();
    if out.is_json() || args.j {
        return out.plain_json(&json, args.pretty);
    }
    rows.iter().try_for_each(|row| out.line(row.line(args.details)))
}

/// What was asked for: words of the grammar.
#[derive(Debug, Default)]
pub(crate) struct Query<'a> {
    /// The kind of object, if one was named.
    pub(crate) object: Option<&'a str>,
    device: Option<&'a str>,
    filters: Vec<(&'a str, &'a str)>,
}

impl<'a> Query<'a> {
    /// Reads `[OBJECT] [show] [OBJECT] [link DEV[/PORT] | dev DEV] [KEY VALUE]…`.
    pub(crate) fn parse(words: &'a [String], objects: &[&str]) -> Result<Self, Failure> {
        let mut words = words.iter().map(String::as_str).peekable();
        let mut query = Self::default();
        while let Some(word) = words.next_if(|w| ["show", "list"].contains(w) || objects.contains(w)) {
            if objects.contains(&word) && query.object.replace(word).is_some() {
                return Err(Failure::Usage(format!("one kind of object at a time; `{word}` is the second")));
            }
        }
        while let Some(key) = words.next() {
            let value = words.next().ok_or_else(|| {
                let objects = objects.join(", ");
                Failure::Usage(format!("`{key}` stands alone: write KEY VALUE, link DEV/PORT or one of {objects}"))
            })?;
            match key {
                "link" | "dev" => query.device = Some(value),
                _ => query.filters.push((key, value)),
            }
        }
        if let Some((_, port)) = query.device.and_then(|d| d.split_once('/'))
            && !["1", "-"].contains(&port)
        {
            return Err(Failure::Usage(format!("there is no port {port}: a device has port 1")));
        }
        Ok(query)
    }

    /// Whether filters were given.
    pub(crate) fn has_filters(&self) -> bool {
        !self.filters.is_empty()
    }

    /// The rows that were asked for. A key that no row of the kind can have is a mistake.
    pub(crate) fn choose(&self, rows: Vec<Row>, keys: &[&str]) -> Result<Vec<Row>, Failure> {
        if let Some((key, _)) = self.filters.iter().find(|(key, _)| !keys.contains(key)) {
            return Err(Failure::Usage(format!("`{key}` is no key here; the keys are {}", keys.join(", "))));
        }
        Ok(rows.into_iter().filter(|row| self.wants(row)).collect())
    }

    fn wants(&self, row: &Row) -> bool {
        let device = self.device.map(|d| d.split_once('/').map_or(d, |(device, _)| device));
        device.is_none_or(|d| d == row.device)
            && self.filters.iter().all(|(key, wanted)| row.get(key).is_some_and(|v| v.is_one_of(wanted)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(lqpn: u64, state: &str) -> Row {
        Row { index: 0, device: "uroce0".into(), of: Of::Link, pairs: Vec::new(), details: Vec::new() }
            .number("lqpn", lqpn)
            .text("state", state)
            .detail("reason", Some(Value::Text("no ACK".into())))
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn filters_take_values_lists_and_ranges() {
        let rows = || vec![row(5, "RTS"), row(6, "ERR"), row(9, "RTS")];
        let chosen = |text: &str| {
            let words = words(text);
            let query = Query::parse(&words, &["qp"]).unwrap();
            let rows = query.choose(rows(), &["lqpn", "state"]).unwrap();
            rows.iter().map(|r| r.get("lqpn").unwrap().text()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(chosen("show qp"), "5 6 9");
        assert_eq!(chosen("qp show lqpn 6-9"), "6 9");
        assert_eq!(chosen("show qp lqpn 5,9 state rts"), "5 9");
        assert_eq!(chosen("show qp lqpn 0x5"), "5");
        assert_eq!(chosen("show qp link uroce0/1 state ERR"), "6");
        assert_eq!(chosen("show qp link mlx5_0/1"), "");
    }

    #[test]
    fn what_is_no_query_is_wrong_usage() {
        for text in ["show cq", "show qp lqpn", "show qp qp", "show qp link uroce0/2"] {
            let words = words(text);
            assert_eq!(Query::parse(&words, &["qp"]).unwrap_err().code(), 2, "{text}");
        }
        let words = words("show qp colour red");
        let query = Query::parse(&words, &["qp"]).unwrap();
        assert_eq!(query.choose(Vec::new(), &["lqpn"]).unwrap_err().code(), 2);
    }

    #[test]
    fn rows_look_like_those_of_rdma() {
        let row = row(5, "RTS");
        assert_eq!(row.line(false), "link uroce0/1 lqpn 5 state RTS");
        assert_eq!(row.line(true), "link uroce0/1 lqpn 5 state RTS\n    reason \"no ACK\"");
        let json = serde_json::to_string(&[Json(&row, false)]).unwrap();
        assert_eq!(json, r#"[{"ifindex":0,"ifname":"uroce0","port":1,"lqpn":5,"state":"RTS"}]"#);
    }
}

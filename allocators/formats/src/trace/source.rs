//! Reads files as rows of fields.

use super::{
    Fault, TraceError,
    compressed::{self, NeedsMemory},
};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, Cursor, Read},
    path::Path,
};

/// The maximum length of a row. It bounds the memory for a file that is not text.
const MAX_ROW: u64 = 4096;

/// The rows of a file, one at a time. Memory does not grow with the file.
pub(crate) struct TraceSource {
    reader: Box<dyn BufRead>,
    /// The number of the row in `line`, counted from 1.
    row: u64,
    line: Vec<u8>,
}

impl TraceSource {
    /// Opens the file at `path`, or standard input for `-`. Compression is detected by the
    /// contents.
    pub(crate) fn open(path: &Path) -> Result<Self, TraceError> {
        if path.as_os_str() == "-" {
            return Self::new(io::stdin().lock());
        }
        let file = File::open(path).map_err(|e| TraceError::whole(Fault::Io(e)))?;
        Self::new(BufReader::with_capacity(1 << 16, file))
    }

    /// Reads from any reader.
    pub(crate) fn new(mut raw: impl BufRead + 'static) -> Result<Self, TraceError> {
        let mut first = Vec::with_capacity(compressed::MAGIC);
        raw.by_ref()
            .take(compressed::MAGIC as u64)
            .read_to_end(&mut first)
            .map_err(|e| TraceError::whole(Fault::Io(e)))?;
        let reader = compressed::reader(&first.clone(), Cursor::new(first).chain(raw));
        Ok(Self { reader, row: 0, line: Vec::with_capacity(128) })
    }

    /// Returns whether the first byte, before compression, is `byte`.
    pub(crate) fn begins_with(&mut self, byte: u8) -> Result<bool, TraceError> {
        let first = self.reader.fill_buf().map_err(|e| TraceError::whole(reading(e)))?;
        Ok(first.first() == Some(&byte))
    }

    /// Returns the remaining bytes, before compression.
    pub(crate) fn bytes(&mut self) -> &mut dyn BufRead {
        &mut *self.reader
    }

    /// Returns the next row and its number, counted from 1, or `None` at the end.
    pub(crate) fn next_row(&mut self) -> Result<Option<(u64, &str)>, TraceError> {
        self.line.clear();
        self.row += 1;
        let row = Some(self.row);
        let read = self.reader.by_ref().take(MAX_ROW).read_until(b'\n', &mut self.line);
        match read {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(e) => return Err(TraceError { row, fault: reading(e) }),
        }
        if self.line.pop_if(|byte| *byte == b'\n').is_none() {
            let fault =
                if self.line.len() as u64 == MAX_ROW { Fault::NoText } else { Fault::CutRow };
            return Err(TraceError { row, fault });
        }
        self.line.pop_if(|byte| *byte == b'\r');
        match std::str::from_utf8(&self.line) {
            Ok(line) if !line.contains('\0') => Ok(Some((self.row, line))),
            _ => Err(TraceError { row, fault: Fault::NoText }),
        }
    }
}

/// Converts a read error. The decompressor distinguishes truncated and corrupt files by the error
/// kind.
fn reading(e: io::Error) -> Fault {
    if let Some(needs) = e.get_ref().and_then(|inner| inner.downcast_ref::<NeedsMemory>()) {
        return Fault::TooMuchMemory { bytes: needs.bytes, most: compressed::MOST };
    }
    match e.kind() {
        io::ErrorKind::UnexpectedEof => Fault::CutStream,
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => {
            Fault::BadStream(e.to_string())
        }
        _ => Fault::Io(e),
    }
}

/// Returns the fields of a row, which must have exactly `N`.
pub(crate) fn fields<const N: usize>(row: &str) -> Result<[&str; N], Fault> {
    let mut fields = [""; N];
    let mut found = 0;
    for field in row.split(',') {
        if let Some(place) = fields.get_mut(found) {
            *place = field;
        }
        found += 1;
    }
    if found == N { Ok(fields) } else { Err(Fault::Fields { found, expected: N }) }
}

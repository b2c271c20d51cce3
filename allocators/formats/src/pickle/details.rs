//! What a history keeps of a snapshot in addition to what a replay needs: text, call stacks and
//! times, in a form that stays small for millions of events.
//!
//! - An event's dictionary becomes an [`EventRecord`] of 48 bytes when it is added to its list.
//! - A list of frames becomes the number of a call stack when it becomes the value of `frames`. The
//!   frames of equal stacks are stored once, also if the file repeats them.
//! - Text is stored once. Only the first 4 KiB of longer text are kept.

use super::word::{Value, Word};
use crate::names::{NameTable, StackTable};

/// The interned values and the events.
#[derive(Debug, Default)]
pub(crate) struct Details {
    /// Text, including that of frames.
    pub(crate) names: NameTable,
    /// Call stacks.
    pub(crate) stacks: StackTable,
    pub(super) events: Vec<EventRecord>,
    /// The size of the tables, in units of an object.
    units: usize,
}

impl Details {
    /// Returns the size of everything, in units of an object.
    pub(super) fn held(&self) -> usize {
        self.units + 2 * self.events.len()
    }

    /// Interns text. Bytes that are not UTF-8 are replaced.
    pub(super) fn text(&mut self, bytes: &[u8]) -> u32 {
        let before = self.names.len();
        let number = self.names.intern(&String::from_utf8_lossy(bytes));
        self.units += (self.names.len() - before) * (4 + bytes.len() / 16);
        number
    }

    /// Interns a frame: `forward at model.py:17`.
    pub(super) fn frame(
        &mut self,
        name: Option<Value>,
        file: Option<Value>,
        line: Option<Value>,
    ) -> u32 {
        let text = |value: Option<Value>| match value {
            Some(Value::Text(text)) => self.names.get(text),
            Some(Value::Word(word)) => word.text(),
            _ => "",
        };
        let (name, file) = (text(name), text(file));
        let frame = match (file, line) {
            ("" | "??", _) => name.to_owned(),
            (file, Some(Value::Int(line))) => format!("{name} at {file}:{line}"),
            (file, _) => format!("{name} at {file}"),
        };
        self.text(frame.as_bytes())
    }

    /// Interns a call stack.
    pub(super) fn stack(&mut self, frames: &[u32]) -> u32 {
        let before = self.stacks.len();
        let number = self.stacks.intern(frames);
        self.units += (self.stacks.len() - before) * (4 + frames.len() / 4);
        number
    }
}

/// An event of a device's trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventRecord {
    /// The address, or the free bytes of the device for a failed request.
    place: i64,
    bytes: i64,
    stream: i64,
    time: i64,
    stack: u32,
    category: u32,
    note: u32,
    action: Word,
    has: u8,
}

/// Bits of `has`, by field.
const ADDRESS: u8 = 1;
const DEVICE_FREE: u8 = 1 << 1;
const BYTES: u8 = 1 << 2;
const STREAM: u8 = 1 << 3;
const TIME: u8 = 1 << 4;
const STACK: u8 = 1 << 5;
const CATEGORY: u8 = 1 << 6;
const NOTE: u8 = 1 << 7;

impl EventRecord {
    /// Converts a dictionary with an action. Returns `None` if a field has another type than events
    /// have: it stays as it is, so that the reader of the snapshot can report it.
    pub(super) fn of(pairs: &[(Word, Value)], details: &mut Details) -> Option<Self> {
        let &(_, Value::Word(action)) = pairs.iter().find(|(key, _)| *key == Word::Action)? else {
            return None;
        };
        let (place, bytes, stream, time) = (0, 0, 0, 0);
        let (stack, category, note) = (0, 0, 0);
        let mut record = Self { place, bytes, stream, time, stack, category, note, action, has: 0 };
        for &(key, value) in pairs {
            record.has |= match (key, value) {
                (Word::Action, _) => 0,
                (Word::Addr, Value::Int(number)) if record.has & DEVICE_FREE == 0 => {
                    record.place = number;
                    ADDRESS
                }
                (Word::DeviceFree, Value::Int(number)) if record.has & ADDRESS == 0 => {
                    record.place = number;
                    DEVICE_FREE
                }
                (Word::Size, Value::Int(number)) => {
                    record.bytes = number;
                    BYTES
                }
                (Word::Stream, Value::Int(number)) => {
                    record.stream = number;
                    STREAM
                }
                (Word::TimeUs, Value::Int(number)) => {
                    record.time = number;
                    TIME
                }
                (Word::Frames, Value::Stack(number)) => {
                    record.stack = number;
                    STACK
                }
                (Word::Category, Value::Text(number)) => {
                    record.category = number;
                    CATEGORY
                }
                (Word::UserMetadata, Value::Text(number)) => {
                    record.note = number;
                    NOTE
                }
                // Text that happens to be a word of the format.
                (Word::Category, Value::Word(word)) => {
                    record.category = details.text(word.text().as_bytes());
                    CATEGORY
                }
                (Word::UserMetadata, Value::Word(word)) => {
                    record.note = details.text(word.text().as_bytes());
                    NOTE
                }
                (Word::Category | Word::UserMetadata, Value::Other) => 0,
                // Python's own frames of other forms are left out.
                (Word::Frames, Value::Other) => 0,
                _ => return None,
            };
        }
        Some(record)
    }

    /// Returns the value of a key, as the dictionary had it.
    pub(super) fn get(&self, word: Word) -> Option<Value> {
        let (bit, value) = match word {
            Word::Action => return Some(Value::Word(self.action)),
            Word::Addr => (ADDRESS, Value::Int(self.place)),
            Word::DeviceFree => (DEVICE_FREE, Value::Int(self.place)),
            Word::Size => (BYTES, Value::Int(self.bytes)),
            Word::Stream => (STREAM, Value::Int(self.stream)),
            Word::TimeUs => (TIME, Value::Int(self.time)),
            Word::Frames => (STACK, Value::Stack(self.stack)),
            Word::Category => (CATEGORY, Value::Text(self.category)),
            Word::UserMetadata => (NOTE, Value::Text(self.note)),
            _ => return None,
        };
        (self.has & bit != 0).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_becomes_a_record_that_answers_as_its_dictionary_did() {
        assert_eq!(size_of::<EventRecord>(), 48);
        let pairs = [
            (Word::Action, Value::Word(Word::Alloc)),
            (Word::Addr, Value::Int(-1)),
            (Word::Size, Value::Int(5)),
            (Word::Frames, Value::Stack(3)),
        ];
        let mut details = Details::default();
        let record = EventRecord::of(&pairs, &mut details).unwrap();
        for (key, value) in pairs {
            assert_eq!(record.get(key), Some(value));
        }
        for absent in [Word::Stream, Word::TimeUs, Word::DeviceFree, Word::Category, Word::Blocks] {
            assert_eq!(record.get(absent), None);
        }
        let bad = [(Word::Action, Value::Word(Word::Alloc)), (Word::Size, Value::Word(Word::Size))];
        let mut of = |pairs| EventRecord::of(pairs, &mut details);
        assert!(of(&bad).is_none() && of(&pairs[1..]).is_none());
    }
}

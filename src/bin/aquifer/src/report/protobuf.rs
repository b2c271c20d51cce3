//! A writer of protobuf messages: fields of whole numbers, fixed 64-bit numbers, text and messages.

/// Wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const DELIMITED: u64 = 2;

/// A message under construction.
#[derive(Default, Debug)]
pub(crate) struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: u64) {
        self.varint(u64::from(field) << 3 | wire);
    }

    /// Adds a whole number, an enum or a boolean.
    pub(crate) fn number(mut self, field: u32, value: u64) -> Self {
        self.key(field, VARINT);
        self.varint(value);
        self
    }

    /// Adds a fixed 64-bit number.
    pub(crate) fn fixed(mut self, field: u32, value: u64) -> Self {
        self.key(field, FIXED64);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds text.
    pub(crate) fn text(self, field: u32, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    /// Adds a message.
    pub(crate) fn message(self, field: u32, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    fn bytes(mut self, field: u32, bytes: &[u8]) -> Self {
        self.key(field, DELIMITED);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    /// Returns the bytes of the message.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_those_of_the_encoding_guide() {
        // The examples of https://protobuf.dev/programming-guides/encoding/
        let number = ProtoMessage::default().number(1, 150);
        assert_eq!(number.as_bytes(), [0x08, 0x96, 0x01]);
        let text = ProtoMessage::default().text(2, "testing");
        assert_eq!(text.as_bytes(), b"\x12\x07testing");
        let nested = ProtoMessage::default().message(3, &number);
        assert_eq!(nested.as_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let fixed = ProtoMessage::default().fixed(47, 1);
        assert_eq!(fixed.as_bytes(), [0xf9, 0x02, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ProtoMessage::default().number(1, u64::MAX).as_bytes().len(), 11);
    }
}

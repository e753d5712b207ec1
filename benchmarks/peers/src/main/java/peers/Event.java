package peers;

import java.io.DataInputStream;
import java.io.BufferedInputStream;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;

/** A payment, as the benchmark's file has it: card, amount, kind and time in milliseconds, big-endian, in the order in which they arrive. */
public class Event {
    public long card;
    public double amount;
    public int kind;
    public long ts;

    public Event() {
    }

    public Event(long card, double amount, int kind, long ts) {
        this.card = card;
        this.amount = amount;
        this.kind = kind;
        this.ts = ts;
    }

    public long getCard() {
        return card;
    }

    public double getAmount() {
        return amount;
    }

    public int getKind() {
        return kind;
    }

    public long getTs() {
        return ts;
    }

    static Event[] read(String path) throws IOException {
        long bytes = Files.size(Path.of(path));
        Event[] events = new Event[(int) (bytes / 28)];
        try (DataInputStream in = new DataInputStream(new BufferedInputStream(Files.newInputStream(Path.of(path)), 1 << 20))) {
            for (int at = 0; at < events.length; at++) {
                events[at] = new Event(in.readLong(), in.readDouble(), in.readInt(), in.readLong());
            }
        }
        return events;
    }

    /** Each match as a line: card, first time, last time, number of rows. */
    static void write(String path, List<long[]> matches) throws IOException {
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(Path.of(path)))) {
            for (long[] match : matches) {
                out.println(match[0] + "," + match[1] + "," + match[2] + "," + match[3]);
            }
        }
    }
}

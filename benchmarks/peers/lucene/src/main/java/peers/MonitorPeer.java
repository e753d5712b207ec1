package peers;

import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.lucene.analysis.core.WhitespaceAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.TextField;
import org.apache.lucene.index.Term;
import org.apache.lucene.monitor.Monitor;
import org.apache.lucene.monitor.MonitorQuery;
import org.apache.lucene.monitor.MultiMatchingQueries;
import org.apache.lucene.monitor.MultipassTermFilteredPresearcher;
import org.apache.lucene.monitor.QueryMatch;
import org.apache.lucene.search.BooleanClause;
import org.apache.lucene.search.BooleanQuery;
import org.apache.lucene.search.PhraseQuery;
import org.apache.lucene.search.Query;
import org.apache.lucene.search.TermQuery;

/** Lucene's Monitor over the same queries and documents. Arguments: queries, documents, documents a batch. Prints the rate, how many matches there were, and a digest of them. */
public final class MonitorPeer {
  private static final String FIELD = "body";
  private static final int QUERIES_AT_ONCE = 10_000;
  private static final int PASSES_OF_PRESEARCHER = 3; // of one to four the quickest here
  private static final int PASSES = 3;
  private static final long WARM_UP_NANOS = 8_000_000_000L;

  public static void main(String[] arguments) throws Exception {
    List<String> queries = Files.readAllLines(Path.of(arguments[0]));
    List<String> documents = Files.readAllLines(Path.of(arguments[1]));
    int batch = Integer.parseInt(arguments[2]);
    try (Monitor monitor = new Monitor(new WhitespaceAnalyzer(), new MultipassTermFilteredPresearcher(PASSES_OF_PRESEARCHER))) {
      long before = System.nanoTime();
      register(monitor, queries);
      System.out.println("seconds to add:" + (System.nanoTime() - before) / 1e9);
      for (long start = System.nanoTime(); System.nanoTime() - start < WARM_UP_NANOS; ) {
        match(monitor, documents, batch);
      }
      measure(monitor, documents, batch);
    }
  }

  /** The median of some passes: by the clock, and by the thread's CPU. */
  private static void measure(Monitor monitor, List<String> documents, int batch) throws Exception {
    ThreadMXBean threads = ManagementFactory.getThreadMXBean();
    double[] rates = new double[PASSES];
    double[] ratesByCpu = new double[PASSES];
    long[] found = {};
    for (int pass = 0; pass < PASSES; pass++) {
      long start = System.nanoTime();
      long cpu = threads.getCurrentThreadCpuTime();
      found = match(monitor, documents, batch);
      ratesByCpu[pass] = documents.size() * 1e9 / (threads.getCurrentThreadCpuTime() - cpu);
      rates[pass] = documents.size() * 1e9 / (System.nanoTime() - start);
    }
    Arrays.sort(rates);
    Arrays.sort(ratesByCpu);
    System.out.println("rate:" + rates[PASSES / 2]);
    System.out.println("rate by CPU:" + ratesByCpu[PASSES / 2]);
    System.out.println("matches:" + found[0]);
    System.out.println("digest:" + Long.toUnsignedString(found[1]));
  }

  private static void register(Monitor monitor, List<String> queries) throws Exception {
    List<MonitorQuery> waiting = new ArrayList<>();
    for (int number = 0; number < queries.size(); number++) {
      waiting.add(new MonitorQuery(Integer.toString(number), parse(queries.get(number))));
      if (waiting.size() == QUERIES_AT_ONCE || number == queries.size() - 1) {
        monitor.register(waiting);
        waiting.clear();
      }
    }
  }

  /** A line is a phrase ("p" and its words), or words that must all be there ("a"), with "-" before those that must not. */
  private static Query parse(String line) {
    String[] words = line.split(" ");
    if (words[0].equals("p")) {
      PhraseQuery.Builder phrase = new PhraseQuery.Builder();
      for (int at = 1; at < words.length; at++) {
        phrase.add(new Term(FIELD, words[at]));
      }
      return phrase.build();
    }
    BooleanQuery.Builder all = new BooleanQuery.Builder();
    for (int at = 1; at < words.length; at++) {
      boolean without = words[at].startsWith("-");
      Query word = new TermQuery(new Term(FIELD, without ? words[at].substring(1) : words[at]));
      all.add(word, without ? BooleanClause.Occur.MUST_NOT : BooleanClause.Occur.MUST);
    }
    return all.build();
  }

  private static long[] match(Monitor monitor, List<String> documents, int batch) throws Exception {
    long count = 0;
    long digest = 0;
    for (int first = 0; first < documents.size(); first += batch) {
      int size = Math.min(batch, documents.size() - first);
      Document[] made = new Document[size];
      for (int at = 0; at < size; at++) {
        made[at] = new Document();
        made[at].add(new TextField(FIELD, documents.get(first + at), Field.Store.NO));
      }
      MultiMatchingQueries<QueryMatch> found = monitor.match(made, QueryMatch.SIMPLE_MATCHER);
      for (int at = 0; at < size; at++) {
        for (QueryMatch each : found.getMatches(at)) {
          count++;
          digest += (1_000_003L * (first + at) + Long.parseLong(each.getQueryId())) * 0x9E3779B97F4A7C15L;
        }
      }
    }
    return new long[] {count, digest};
  }

  private MonitorPeer() {}
}
